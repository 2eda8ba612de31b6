"""The runner's own promises: overlap, slots, prompt scores, and rows that cannot hurt others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from support.decoder_rig import GREEDY, Recorder, decoder_rig, load_decoder
from triptych.core.engine_api.plan import TokenPlan, TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import OutOfMemory
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.sampling.sampler import Sampler

PROMPT = tuple(range(3, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("runner")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder)


def prefill_plan(slot: int, pages: tuple[int, ...], sampling: SamplingParams = GREEDY) -> TokenPlan:
    row = TokenRow(
        job_id="j",
        slot=slot,
        start=0,
        num_tokens=len(PROMPT),
        token_ids=PROMPT,
        new_page_ids=pages,
        sampling=sampling,
        history_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
    )
    return TokenPlan(step_id=1, model="m", kind="prefill", rows=(row,))


def decode_plan(slot: int, start: int) -> TokenPlan:
    row = TokenRow(job_id="j", slot=slot, start=start, num_tokens=1)
    return TokenPlan(step_id=2, model="m", kind="decode", rows=(row,))


def test_the_next_plan_may_be_launched_before_the_last_is_read(decoder: Decoder) -> None:
    rig = decoder_rig(decoder)
    row = rig.open(PROMPT)
    rig.prefill(row)
    rig.decode(row, num_steps=2)
    pages = tuple(rig.free_pages[-5:])
    other = rig.free_slots[-1]
    pending = [rig.runner.launch(prefill_plan(other, pages))]
    pending += [rig.runner.launch(decode_plan(other, len(PROMPT) + i)) for i in range(2)]
    ids = [step.result().rows[0].token_ids[0] for step in pending]
    assert ids == row.tokens[len(PROMPT) :]


def test_a_chunk_short_of_its_prompt_yields_nothing(decoder: Decoder) -> None:
    rig = decoder_rig(decoder)
    row = rig.open(PROMPT)
    result = rig.step((row, 5))
    assert result.rows[0].token_ids == ()
    assert result.rows[0].is_finite
    assert not row.logits


def test_a_slot_forgets_its_last_row(decoder: Decoder) -> None:
    rig = decoder_rig(decoder)
    curious = SamplingParams(temperature=0.0, prompt_logprobs=True)
    first = rig.runner.launch(prefill_plan(0, (9, 8, 7, 6, 5), curious)).result().rows[0]
    for pages in rig.kv.tensors:
        pages.zero_()
    second = rig.runner.launch(prefill_plan(0, (0, 1, 2, 3, 4))).result().rows[0]
    assert first.prompt_logprobs
    assert not second.prompt_logprobs
    assert second.token_ids == first.token_ids
    is_written = rig.kv.pages[0].k_NPKD.flatten(1).any(dim=1)
    assert is_written.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_prompt_logprobs_across_chunks(folder: Path, decoder: Decoder) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=2)
    rig = decoder_rig(decoder)
    row, quiet = rig.open(PROMPT, sampling), rig.open(PROMPT)
    results = [rig.step((quiet, len(PROMPT)), (row, 6)), rig.step((quiet, 0), (row, 11))]
    assert not any(result.rows[0].prompt_logprobs for result in results)
    entries = [entry for result in results for entry in result.rows[1].prompt_logprobs]

    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected_TV = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert [entry.token_id for entry in entries] == list(PROMPT[1:])
    for position, entry in enumerate(entries):
        logprobs_V = expected_TV[position]
        assert entry.logprob == pytest.approx(logprobs_V[entry.token_id].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == logprobs_V.topk(2).indices.tolist()


def test_prompt_logprobs_stop_at_the_prompt_of_a_resumed_row(decoder: Decoder) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=True)
    rig = decoder_rig(decoder)
    row = rig.open(PROMPT, sampling)
    rig.prefill(row)
    rig.decode(row, num_steps=3)
    rig.preempt(row)
    result = rig.step((row, len(row.tokens)))
    assert len(result.rows[0].prompt_logprobs) == len(PROMPT) - 1


class PoisonedModel(Recorder):
    """Its hidden states turn to NaN wherever a given token goes in, cache included."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        hidden_TC = super().forward(ids, positions, step)
        is_poison_T = ids == 66
        hidden_TC[is_poison_T] = torch.nan
        for pages in step.kv.tensors:
            pages.flatten(0, 1)[step.batch.write_slots_T[is_poison_T]] = torch.nan
        return hidden_TC


def test_nan_stays_in_its_row_and_does_not_outlive_it(decoder: Decoder) -> None:
    healthy = decoder_rig(decoder)
    alone = healthy.open(PROMPT)
    healthy.prefill(alone)
    healthy.decode(alone, num_steps=4)

    rig = decoder_rig(decoder, max_length=24, max_batch_size=2, recorder=PoisonedModel)
    sick, row = rig.open((5, 6, 66)), rig.open(PROMPT)
    result = rig.step((sick, 3), (row, 7))
    assert [r.is_finite for r in result.rows] == [False, True]
    rig.preempt(sick)  # its pages, still full of NaN, go to the next row that asks
    rig.prefill(row)
    rig.decode(row, num_steps=4)
    assert row.tokens == alone.tokens


def test_running_out_of_memory_is_an_error_of_the_step(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = decoder_rig(decoder)

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rig.recorder, "forward", fail)
        with pytest.raises(OutOfMemory):
            rig.runner.launch(prefill_plan(0, (0, 1, 2, 3, 4)))
    assert rig.runner.launch(prefill_plan(0, (0, 1, 2, 3, 4))).result().rows[0].is_finite


def test_a_step_behind_one_that_could_not_start_writes_to_its_own_pages(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = decoder_rig(decoder)
    rig.runner.launch(prefill_plan(0, (9, 8, 7, 6, 5)))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "bind", fail)
        with pytest.raises(OutOfMemory):
            rig.runner.launch(prefill_plan(0, (0, 1, 2, 3, 4)))
    for pages in rig.kv.tensors:
        pages.zero_()
    rig.runner.launch(decode_plan(0, len(PROMPT)))
    is_written = rig.kv.pages[0].k_NPKD.flatten(1).any(dim=1)
    assert is_written.nonzero().flatten().tolist() == [4]


def test_a_closed_runner_holds_no_cache(decoder: Decoder) -> None:
    rig = decoder_rig(decoder)
    rig.runner.close()
    with pytest.raises(AttributeError):
        rig.runner.launch(prefill_plan(0, (0, 1, 2, 3, 4)))

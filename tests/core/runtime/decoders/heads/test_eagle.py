"""EAGLE-3 heads: drafts are those of the published forward, on every way through the engine."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.batch_driver import BatchDriver
from support.captured import verified_steps
from support.decoder_rig import load_decoder
from support.eagle import PublishedEagle, eagle_config, join_head, random_tensors
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.runtime.graphs.buckets import DecodeBuckets
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.kernels.native.library import NativeKernels

LAYERS = (1, 3, 2)
PROMPT = tuple(range(3, 24))


def random_llama(folder: Path) -> Any:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("is_native", [True, False])
def test_drafts_are_those_of_the_published_forward(
    tmp_path: Path, native: NativeKernels, is_native: bool
) -> None:
    """Prompts in chunks, shared and preempted; drafts of drafts; captured steps, and torch's."""
    kernels = native if is_native else None
    model, decoder = random_llama(tmp_path), load_decoder(tmp_path, native=kernels)
    config = eagle_config(decoder, vocab_size=60, has_normed_residual=is_native)
    tensors = random_tensors(config, decoder.vocab_size)
    steps, backend = verified_steps()
    graphs = DecodeGraphs(steps, DecodeBuckets.choose(4, 16)) if is_native else None
    driver = BatchDriver(
        decoder,
        decoder.config.kv_layout(4, torch.float32),
        kernels,
        num_pages=18,
        draft=join_head(config, tensors, decoder, LAYERS, kernels),
        max_batch_size=4,
        max_length=64,
        max_batch_input_tokens=9,
        graphs=graphs,
    )
    assert driver.drafter is not None
    prices = cycle((*[0.0] * 12, *[math.inf] * 4))
    driver.drafter.costs.model_price = lambda num_rows, num_drafts: next(prices)
    for number in range(7):
        sampling = SamplingParams(temperature=0.5 * (number % 2), seed=number, max_tokens=24)
        request = TokenRequest(prompt_ids=(*PROMPT, *PROMPT[: number % 4]), sampling=sampling)
        driver.submit(str(number), request)
    driver.run()
    counters = driver.scheduler.stats().counters
    assert counters["preemptions_total"] > 0
    assert counters["cached_tokens_total"] > 0
    assert backend.num_replays > 5 or not is_native
    assert sum(len(drafts.token_ids) > 1 for drafts in driver.drafts) > 10
    embeddings_VC = model.get_input_embeddings().weight.detach()
    published = PublishedEagle(config, tensors, embeddings_VC)
    for job_id in driver.jobs:
        answer = [token for delta in driver.deltas(job_id) for token in delta.token_ids]
        text = [*driver.requests[job_id].prompt_ids, *answer]
        with torch.inference_mode():
            found = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            rows_TW = published.fuse([found[layer][0] for layer in LAYERS])
            for drafts in driver.drafts:
                if drafts.job_id == job_id:
                    check(published, text[: drafts.first], rows_TW, drafts)


def check(published: PublishedEagle, known: list[int], rows_TW: torch.Tensor, drafts: Any) -> None:
    """The logits of each draft follow from the text and the drafts before it."""
    token_ids, rows_TW = known[1:], rows_TW[: len(known) - 1]
    for drafted, logits_V in zip(drafts.token_ids, drafts.logits, strict=True):
        hidden_TC = published.hidden(token_ids, rows_TW)
        expected = published.logits(hidden_TC[-1:], len(logits_V))[0]
        torch.testing.assert_close(logits_V, expected, atol=1e-4, rtol=1e-4)
        token_ids, rows_TW = [*token_ids, drafted], torch.cat([rows_TW, hidden_TC[-1:]])

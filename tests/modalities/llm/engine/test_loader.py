"""Loading a model: memory asked for and given back, pages shared out, faults named."""

from __future__ import annotations

import re
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

from support.llm_loader import MIB, Save, config, loader
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.plan import PendingStep, Plan
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ConfigError, MemoryBudgetExceeded, ModelTooLarge, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DebugOptions,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
)
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.ranks import Ranks
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.schedulers.base import LoadedModel


def pages_of(ledger: Ledger) -> int:
    layers, page, kv_heads, head_dim, itemsize = 2, 32, 2, 8, 4
    return ledger.by_owner()["tiny/kv"] // (2 * layers * page * kv_heads * head_dim * itemsize) - 1


def test_a_loaded_model_holds_memory_until_it_is_closed(save: Save) -> None:
    ledger, progress = Ledger(64 * MIB), []
    loaded = loader(save(), ledger, config()).load(progress.append)
    assert loaded.name == "tiny"
    assert set(ledger.by_owner()) == {"tiny/weights", "tiny/activations", "tiny/kv"}
    assert progress[-1] == 1.0
    assert progress == sorted(progress)
    loaded.scheduler.check()
    loaded.close()
    assert ledger.by_owner() == {}


def test_the_weights_are_charged_by_the_byte(save: Save) -> None:
    folder, ledger = save(), Ledger(64 * MIB)
    loader(folder, ledger, config()).load(lambda _: None)
    stored = sum(t.numel() * 4 for t in load_file(folder / "model.safetensors").values())
    assert ledger.by_owner()["tiny/weights"] == stored


def test_weights_are_held_in_blocks_on_request(save: Save) -> None:
    """8 bits and a scale for 32 of them where rows are whole blocks: all but a layer's last."""
    ledger, options = Ledger(64 * MIB), config(models=ModelOptions(quantization_encoding="q8_0"))
    folder = save()
    loaded = loader(folder, ledger, options).load(lambda _: None)
    tensors = load_file(folder / "model.safetensors")
    in_blocks = sum(t.numel() for name, t in tensors.items() if t.dim() == 2 and "down" not in name)
    plain = sum(tensor.numel() for tensor in tensors.values()) - in_blocks
    assert ledger.by_owner()["tiny/weights"] == in_blocks // 32 * 34 + plain * 4
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    outputs: list[Output] = []
    request = TokenRequest(prompt_ids=(5, 6, 7), sampling=sampling)
    job = Job(job_id="0", model="tiny", request=request, sink=outputs.append, arrival_s=0.0)
    loaded.scheduler.submit(job)
    run_to_the_end(loaded)
    assert sum(len(output.payload.token_ids) for output in outputs) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_impl": "transformers", "quantization_encoding": "q4_0"}, "on our own decoder"),
        ({"quantization_encoding": "gptq"}, "gptq: this model's weights are plain"),
        ({"dtype": "float32", "quantization_encoding": "bfloat16"}, "conflict"),
    ],
)
def test_encodings_that_cannot_be_had(save: Save, fields: dict[str, str], message: str) -> None:
    options = config(models=ModelOptions(**fields))
    with pytest.raises(ConfigError, match=message):
        loader(save(), Ledger(64 * MIB), options).load(lambda _: None)


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_kernels_of_a_gpu_are_refused_where_transformers_computes_on_a_cpu(
    save: Save, backend: str
) -> None:
    device = DeviceOptions(attention_backend=backend, threads=1)
    options = config(models=ModelOptions(model_impl="transformers"), device=device)
    with pytest.raises(ConfigError, match=f"--attention-backend {backend}"):
        loader(save(), Ledger(64 * MIB), options).load(lambda _: None)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"models": ModelOptions(model_impl="transformers")}, "does not run on our decoder"),
        ({"models": ModelOptions(quantization_encoding="q8_0")}, r"blocks of 32 inputs \(q8_0\)"),
        ({"device": DeviceOptions(tensor_parallel_size=5)}, "divided by 4 at most"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_before_anything_starts(
    save: Save, sections: dict[str, Any], message: str
) -> None:
    options = config(**{"device": DeviceOptions(tensor_parallel_size=2, threads=1)} | sections)
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=message):
        loader(save(), Ledger(64 * MIB), options).load(lambda _: None)
    assert psutil.Process().children() == before


def test_pages_are_bounded_by_what_full_batches_can_use(save: Save) -> None:
    ledger = Ledger(512 * MIB)
    loader(save(), ledger, config()).load(lambda _: None)
    assert pages_of(ledger) == 4 * (256 // 32)


def test_pages_are_bounded_by_the_option(save: Save) -> None:
    ledger = Ledger(512 * MIB)
    cache = CacheOptions(kv_cache_memory_mb=1)
    loader(save(), ledger, config(cache=cache, schedule=ScheduleOptions())).load(lambda _: None)
    assert pages_of(ledger) == 1024 * 1024 // (2 * 2 * 32 * 2 * 8 * 4)


def test_a_cpu_keeps_most_of_its_memory(save: Save) -> None:
    ledger = Ledger(16 * MIB)
    schedule = ScheduleOptions(max_batch_size=512, max_batch_input_tokens=64)
    loader(save(), ledger, config(schedule=schedule)).load(lambda _: None)
    assert ledger.by_owner()["tiny/kv"] <= ledger.capacity_bytes // 4 + 2**14


def test_several_models_share_what_is_left(save: Save) -> None:
    schedule = ScheduleOptions(max_batch_size=512, max_batch_input_tokens=64)
    folder, pages = save(), []
    for references in ((), ("a", "b", "c", "d", "e", "f", "g", "h")):
        ledger = Ledger(16 * MIB)
        models = ModelOptions(model=references)
        loader(folder, ledger, config(schedule=schedule, models=models)).load(lambda _: None)
        pages.append(pages_of(ledger))
    assert 0 < pages[1] < pages[0]


@pytest.mark.parametrize("capacity", [0, 2**15, 2**20])
def test_without_room_nothing_is_held(save: Save, capacity: int) -> None:
    ledger = Ledger(capacity)
    with pytest.raises(MemoryBudgetExceeded, match="tiny"):
        loader(save(), ledger, config()).load(lambda _: None)
    assert ledger.by_owner() == {}


def test_a_context_that_does_not_fit_says_what_to_lower_before_weights_are_read(save: Save) -> None:
    cramped, progress = Ledger(64 * MIB), []
    folder = save()
    loader(folder, cramped, config()).load(lambda _: None)
    held = cramped.by_owner()
    ledger = Ledger(held["tiny/weights"] + held["tiny/activations"] + 2**15)
    with pytest.raises(MemoryBudgetExceeded, match="--max-length"):
        loader(folder, ledger, config()).load(progress.append)
    assert not progress


EDITS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"model__layers__1__mlp__up_proj__weight": None}, "layers.1.mlp.up_proj.weight"),
    "extra": ({"model__layers__0__self_attn__sink": torch.zeros(3)}, "layers.0.self_attn.sink"),
    "mis-shaped": (
        {"model__layers__0__self_attn__k_proj__weight": torch.zeros(32, 32)},
        "layers.0.self_attn.k_proj.weight",
    ),
}


@pytest.mark.parametrize(("edits", "tensor"), EDITS.values(), ids=EDITS)
def test_incomplete_weights_are_refused_by_tensor_and_file(
    save: Save, edits: dict[str, torch.Tensor | None], tensor: str
) -> None:
    ledger = Ledger(64 * MIB)
    with pytest.raises(WeightsError) as caught:
        loader(save(**edits), ledger, config()).load(lambda _: None)
    assert tensor in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    assert ledger.by_owner() == {}


@pytest.mark.parametrize(
    ("cache", "head_bytes"),
    [("auto", 16), ("float32", 32), ("float8_e4m3fn", 8), ("int8", 10)],
)
def test_the_cache_keeps_its_own_type(save: Save, cache: str, head_bytes: int) -> None:
    ledger, options = Ledger(64 * MIB), CacheOptions(kv_cache_format=cache)
    models = ModelOptions(dtype="bfloat16")
    loader(save(), ledger, config(models=models, cache=options)).load(lambda _: None)
    layers, page, kv_heads, num_pages = 2, 32, 2, 4 * (256 // 32) + 1
    page_bytes = 2 * layers * page * kv_heads * head_bytes
    assert ledger.by_owner()["tiny/kv"] == num_pages * page_bytes


@pytest.mark.parametrize("captures", [None, True])
def test_a_loaded_model_answers_as_transformers_does(save: Save, captures: bool | None) -> None:
    """Scheduler and runner together: chunked prompts, mixed steps, two steps in flight."""
    folder, outputs = save(), list[Output]()
    options = config(
        schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=16),
        device=DeviceOptions(device_graph_capture=captures),
        debug=DebugOptions(debug_verify_replay=bool(captures)),
    )
    loaded = loader(folder, Ledger(64 * MIB), options).load(lambda _: None)
    prompts = [tuple(range(3, 3 + n)) for n in (5, 41, 18)]
    sampling = SamplingParams(temperature=0.0, max_tokens=9)
    for index, prompt in enumerate(prompts):
        request = TokenRequest(prompt_ids=prompt, sampling=sampling)
        loaded.scheduler.submit(
            Job(
                job_id=str(index), model="tiny", request=request, sink=outputs.append, arrival_s=0.0
            )
        )
    run_to_the_end(loaded)
    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    for index, prompt in enumerate(prompts):
        ids = [t for o in outputs if o.job_id == str(index) for t in o.payload.token_ids]
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None
        )
        assert ids == expected[0, len(prompt) :].tolist()
    loaded.scheduler.check()


def run_to_the_end(loaded: LoadedModel) -> None:
    in_flight: deque[tuple[Plan, PendingStep]] = deque()
    for step_id in range(200):
        proposal = loaded.scheduler.propose(0.0)
        plan = proposal and loaded.scheduler.book(proposal, step_id, 0.0)
        if plan is not None:
            in_flight.append((plan, loaded.runner.launch(plan)))
        if len(in_flight) == 2 or (plan is None and in_flight):
            done, pending = in_flight.popleft()
            loaded.scheduler.commit(done, pending.result(), 0.0)
        elif plan is None:
            return
    raise AssertionError("the jobs never end")


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [("auto", "Decoder"), ("native", "Decoder"), ("transformers", "FallbackModel")],
)
def test_the_implementation_can_be_chosen(
    save: Save, monkeypatch: pytest.MonkeyPatch, wanted: str, kind: str
) -> None:
    built = []
    monkeypatch.setattr(
        "triptych.modalities.llm.engine.loader.TextHead",
        lambda model, *args, **kwargs: built.append(model) or TextHead(model, *args, **kwargs),
    )
    options = config(models=ModelOptions(model_impl=wanted))
    loader(save(), Ledger(64 * MIB), options).load(lambda _: None).close()
    assert [type(model).__name__ for model in built] == [kind]


def test_auto_falls_back_for_what_our_decoder_does_not_know(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    other = transformers.Ernie4_5ForCausalLM(
        transformers.Ernie4_5Config(**sizes, **heads, **special)
    )
    other.save_pretrained(tmp_path)
    loader(tmp_path, Ledger(64 * MIB), config()).load(lambda _: None).close()
    native = loader(tmp_path, Ledger(64 * MIB), config(models=ModelOptions(model_impl="native")))
    with pytest.raises(WeightsError, match="--model-impl transformers"):
        native.load(lambda _: None)


@pytest.mark.parametrize(
    ("model_impl", "cpu_kernels", "reason"),
    [("transformers", "auto", "on transformers"), ("native", "torch", "on torch alone")],
)
def test_determinism_is_refused_where_it_cannot_be_kept(
    save: Save, model_impl: str, cpu_kernels: str, reason: str
) -> None:
    config = Config(
        models=ModelOptions(model_impl=model_impl),
        device=DeviceOptions(enable_deterministic_inference=True, cpu_kernels=cpu_kernels),
    )
    with pytest.raises(ConfigError, match=f"^--enable-deterministic-inference: .*{reason}"):
        loader(save(), Ledger(256 * MIB), config).load(lambda done: None)


def test_rows_that_must_not_depend_on_their_batch_need_a_cache_of_the_kernels(
    save: Save,
) -> None:
    config = Config(
        device=DeviceOptions(enable_deterministic_inference=True),
        cache=CacheOptions(kv_cache_format="float16"),
    )
    with pytest.raises(ConfigError, match=r"^--enable-deterministic-inference: .*\(float16"):
        loader(save(), Ledger(256 * MIB), config).load(lambda done: None)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99])
def test_what_never_fits_is_known_beforehand_and_the_context_offered_fits(
    save: Save, share: float, kernels: str
) -> None:
    """Whatever memory there is: the check and the load agree, and the advice is good."""
    folder = save()
    device = DeviceOptions(cpu_kernels="auto" if kernels == "native" else "off")
    options = config(device=device)
    ledger = Ledger(2**30)
    whole = loader(folder, ledger, options).load(lambda share: None)
    held = sum(ledger.by_owner().values())
    whole.close()
    capacity = int(held * share)
    small = Ledger(capacity)
    measured = loader(folder, small, options)
    refused: list[ModelTooLarge] = []
    for attempt in (measured.check_size, lambda: measured.load(lambda share: None).close()):
        try:
            attempt()
        except ModelTooLarge as error:
            refused.append(error)
    small.check()
    assert small.available_bytes == capacity
    assert len(refused) in (0, 2)
    if not refused:
        return
    assert "--device-memory-utilization" in refused[0].message
    offered = re.search(r"--max-length (\d+)", refused[0].message)
    if offered is not None:
        shorter = replace(options, models=ModelOptions(max_length=int(offered[1])))
        loader(folder, small, shorter).load(lambda share: None).close()


def test_a_smaller_context_is_offered_by_its_number(save: Save) -> None:
    folder, ledger = save(), Ledger(2**30)
    options = config()
    loaded = loader(folder, ledger, options).load(lambda share: None)
    pages = ledger.by_owner()["tiny/kv"]
    others = sum(ledger.by_owner().values()) - pages
    loaded.close()
    page_bytes = pages // (4 * 256 // options.cache.kv_cache_page_size + 1)
    tight = Ledger(others + 3 * page_bytes)
    tokens = 2 * options.cache.kv_cache_page_size
    with pytest.raises(ModelTooLarge, match=rf"Give --max-length {tokens}, or raise"):
        loader(folder, tight, options).load(lambda share: None)
    beside = Ledger(others + 300 * page_bytes)
    other = beside.reserve("other/weights", 297 * page_bytes)
    with pytest.raises(MemoryBudgetExceeded, match="lower --max-length") as caught:
        loader(folder, beside, options).load(lambda share: None)
    assert not isinstance(caught.value, ModelTooLarge)
    other.release()
    loader(folder, beside, options).load(lambda share: None).close()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_divided_model_is_measured_by_its_largest_part_without_its_ranks(
    save: Save, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """All ranks of a CPU take from one memory; of three the first has the fewest heads."""
    monkeypatch.setattr(Ranks, "start", _unstarted)
    device = DeviceOptions(tensor_parallel_size=num_ranks, cpu_kernels="torch")
    folder, options = save(), config(device=device)
    model = loader(folder, plenty := Ledger(2**30), options)
    model.check_size()
    with open_checkpoint(str(folder)) as checkpoint, ExitStack() as stack:
        memory = model._memory(stack)
        memory.num_ranks = num_ranks
        parts = [_part(model, memory, checkpoint, rank) for rank in range(num_ranks)]
        model._reserve(parts[0], memory)
        taken = sum(plenty.by_owner().values())
        for part in parts:
            assert part.weight_bytes() == parts[0].weight_bytes() >= _held(part)
    ledger = Ledger(taken)
    with pytest.raises(ModelTooLarge, match="its weights leave no memory for a cache"):
        loader(folder, ledger, options).check_size()
    assert ledger.available_bytes == taken
    with pytest.raises(ModelTooLarge, match="tiny/activations"):
        loader(folder, Ledger(taken - 1), options).check_size()


def _unstarted(*_: Any) -> Any:
    raise AssertionError("no rank is started to be measured")


def _part(model: LlmLoader, memory: Any, checkpoint: Checkpoint, rank: int) -> Any:
    blueprint = model._blueprint(checkpoint, memory, None)
    blueprint.join(RankGroup(None, rank, memory.num_ranks, lambda *place: None))
    return blueprint


def _held(part: Any) -> int:
    """Bytes of the parameters of this part."""
    decoder = Decoder(part.config, dtype=part.dtype, device=torch.device("meta"))
    return sum(target.num_bytes(part.dtype.itemsize) for target in decoder_targets(decoder))

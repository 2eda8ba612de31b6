"""Steps of language models: each family of our decoder, and those that transformers runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.decoder_families import FAMILIES, TINY, save_family
from support.dry_run import DryRun, dry_run
from support.fake_cuda import FakeCuda
from triptych.core.config import CacheOptions, Config, DeviceOptions, ModelOptions
from triptych.core.sampling_params import SamplingParams
from triptych.core.tokens import TokenDelta, TokenRequest
from triptych.modalities.llm.engine.loader import LlmLoader

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
SAMPLINGS = {
    "greedy": GREEDY,
    "filtered": SamplingParams(top_k=5, top_p=0.9, min_p=0.1, seed=3, max_tokens=3),
    "random": SamplingParams(temperature=0.7, seed=4, max_tokens=3),
    "likely": SamplingParams(temperature=0.7, top_logprobs=3, max_tokens=3),
    "edited": SamplingParams(
        logit_bias=((3, 1.0), (4, -1.0)), min_tokens=2, stop_token_ids=(9, 11), max_tokens=3
    ),
    "penalised": SamplingParams(
        repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, max_tokens=3
    ),
    "scored": SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=2, max_tokens=2),
    "state": SamplingParams(returns_state=True, max_tokens=1),
}
FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def request(length: int, sampling: SamplingParams) -> TokenRequest:
    return TokenRequest(prompt_ids=tuple(range(3, 3 + length)), sampling=sampling)


def run_together(run: DryRun, *samplings: SamplingParams) -> None:
    """Prompts of several lengths, cut into chunks that share steps with decoding rows."""
    run.depth = 2
    for index, sampling in enumerate(samplings):
        run.submit(str(index), request(5 + 9 * index % 27, sampling))
    run.end_well()


@pytest.mark.parametrize(("family", "extra"), FAMILIES.values(), ids=FAMILIES)
def test_each_family(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str, extra: dict[str, Any]
) -> None:
    save_family(tmp_path, family, **extra)
    run = dry_run(gpu, LlmLoader, tmp_path, config)
    run_together(run, GREEDY, SAMPLINGS["random"], GREEDY)
    assert run.runner.peaks.keys() >= {"prefill", "mixed", "decode"}
    assert gpu.kernels >= {"paged_decode", "paged_prefill", "rope_write", "rms_norm", "gated"}
    assert gpu.faults == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_family(folder, "Llama")
    return folder


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_way_to_draw(gpu: FakeCuda, llama: Path, config: Config, name: str) -> None:
    run = dry_run(gpu, LlmLoader, llama, config)
    run_together(run, SAMPLINGS[name], GREEDY, SAMPLINGS[name])
    assert gpu.faults == []


def test_all_ways_in_one_batch(gpu: FakeCuda, llama: Path, config: Config) -> None:
    wide = replace(config, schedule=replace(config.schedule, max_batch_size=8))
    run = dry_run(gpu, LlmLoader, llama, wide)
    run_together(run, *SAMPLINGS.values())
    assert gpu.kernels >= {"add_rms_norm", "penalised", "sample_rows"}
    assert gpu.faults == []
    assert all(isinstance(delta, TokenDelta) for delta in run.payloads("0"))


def test_steps_that_are_captured(gpu: FakeCuda, llama: Path, config: Config) -> None:
    """What is recorded may not wait at all, nor may what is around it."""
    captured = replace(config, device=DeviceOptions(device_graph_capture=True))
    run = dry_run(gpu, LlmLoader, llama, captured)
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert gpu.faults == []
    assert gpu.num_replays > 0


def test_a_plain_step_brings_one_thing_back(gpu: FakeCuda, llama: Path, config: Config) -> None:
    run = dry_run(gpu, LlmLoader, llama, config)
    run.submit("a", request(7, GREEDY))
    run.end_well()
    assert {count for counts in run.runner.reads.values() for count in counts} == {1}


@pytest.mark.parametrize(
    ("dtype", "cache", "captures"),
    [
        ("bfloat16", "auto", False),
        ("float16", "auto", False),
        ("float32", "bfloat16", False),
        ("bfloat16", "float8_e4m3fn", False),
        ("bfloat16", "int8", False),
        ("bfloat16", "int8", True),
    ],
)
def test_types_of_weights_and_cache(
    gpu: FakeCuda, llama: Path, config: Config, dtype: str, cache: str, captures: bool
) -> None:
    models = ModelOptions(dtype=dtype, cache_dir=config.models.cache_dir)
    cached = CacheOptions(kv_cache_page_size=16, kv_cache_format=cache)
    device = DeviceOptions(device_graph_capture=captures)
    choices = replace(config, models=models, cache=cached, device=device)
    run = dry_run(gpu, LlmLoader, llama, choices)
    run_together(run, GREEDY, GREEDY)
    assert gpu.faults == []


@pytest.mark.parametrize("encoding", ["q8_0", "q4_0", "q4_k"])
def test_weights_in_blocks(gpu: FakeCuda, llama: Path, config: Config, encoding: str) -> None:
    models = replace(config.models, quantization_encoding=encoding)
    run = dry_run(gpu, LlmLoader, llama, replace(config, models=models))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert gpu.faults == []


@pytest.mark.parametrize(("family", "extra"), FALLBACKS.values(), ids=FALLBACKS)
def test_models_that_transformers_runs(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str, extra: dict[str, Any]
) -> None:
    sizes = {name: value for name, value in TINY.items() if name != "head_dim"}
    kind = getattr(transformers, f"{family}Config")
    getattr(transformers, f"{family}ForCausalLM")(kind(**sizes | extra)).save_pretrained(tmp_path)
    models = replace(config.models, model_impl="transformers", dtype="bfloat16")
    run = dry_run(gpu, LlmLoader, tmp_path, replace(config, models=models))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert gpu.faults == []

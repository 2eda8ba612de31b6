"""Steps of language models: each family of our decoder, and those that transformers runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import unset_fake_temporarily

from support.bound_rows import bound_row
from support.decoder_families import FAMILIES, TINY, VARIANTS, save_family
from support.dry_run import DryRun, dry_run
from support.eagle import save_head
from support.fake_cuda import CUDA, FakeCuda
from support.kernel_device import is_interpreted
from support.shadow_drafts import FreeDrafts
from support.tiers import first, nightly
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import ConfigError
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
    SpeculationOptions,
)
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.engine import proof
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.modalities.vlm.engine.loader import VisionLoader

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)
SAMPLINGS = {
    "greedy": GREEDY,
    "filtered": SamplingParams(top_k=5, top_p=0.9, min_p=0.1, seed=3, max_tokens=3),
    "random": SamplingParams(temperature=0.7, seed=4, max_tokens=3),
    "likely": SamplingParams(temperature=0.7, top_logprobs=3, max_tokens=3),
    "edited": SamplingParams(
        logit_bias=((3, 1.0), (4, -1.0)), min_tokens=2, stop_token_ids=(9, 11), max_tokens=3
    ),
    "penalized": SamplingParams(
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "extra"),
    [nightly(*case) if name in VARIANTS else case for name, case in FAMILIES.items()],
    ids=FAMILIES,
)
def test_each_family(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str, extra: dict[str, Any]
) -> None:
    save_family(tmp_path, family, **extra)
    run = dry_run(gpu, LlmLoader, tmp_path, config)
    run_together(run, GREEDY, SAMPLINGS["random"], GREEDY)
    assert run.runner.peaks.keys() >= {"prefill", "mixed", "decode"}
    own = {"latent_decode", "latent_prefill", "latent_write"}
    plain = {"paged_decode", "paged_prefill", "rope_write"}
    assert gpu.kernels >= {"rms_norm", *(own if family == "Youtu" else plain)}
    assert gpu.kernels >= ({"route", "moe_mlp"} if "experts" in str(extra) else {"gated"})
    assert gpu.faults == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_family(folder, "Llama")
    return folder


def test_the_workspace_of_libraries_is_in_the_ledger(
    gpu: FakeCuda, llama: Path, config: Config
) -> None:
    run = dry_run(gpu, LlmLoader, llama, config)
    assert run.ledger.by_owner()["tiny/libraries"] == 2**25


def test_large_batches_are_chosen_for_a_large_gpu_and_reported(
    gpu: FakeCuda, llama: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    run = dry_run(gpu, LlmLoader, llama, replace(config, schedule=ScheduleOptions()), 2**36)
    for job in range(200):
        run.submit(str(job), request(5, GREEDY))
    run.end_well()
    assert any(
        "tiny: steps of up to 256 rows (--max-batch-size) and 8192 tokens" in line
        for line in caplog.messages
    )
    assert gpu.faults == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_way_to_sample(gpu: FakeCuda, llama: Path, config: Config, name: str) -> None:
    run = dry_run(gpu, LlmLoader, llama, config)
    run_together(run, SAMPLINGS[name], GREEDY, SAMPLINGS[name])
    assert gpu.faults == []


@pytest.mark.gpu
def test_all_ways_in_one_batch(gpu: FakeCuda, llama: Path, config: Config) -> None:
    wide = replace(config, schedule=replace(config.schedule, max_batch_size=8))
    run = dry_run(gpu, LlmLoader, llama, wide)
    run_together(run, *SAMPLINGS.values())
    assert gpu.kernels >= {"add_rms_norm", "penalized", "sample_rows"}
    assert gpu.faults == []
    assert all(isinstance(delta, TokenDelta) for delta in run.payloads("0"))


@pytest.mark.gpu
def test_steps_that_are_captured(gpu: FakeCuda, llama: Path, config: Config) -> None:
    """What is recorded may not wait at all, nor may what is around it."""
    captured = replace(config, device=DeviceOptions(device_graph_capture=True))
    run = dry_run(gpu, LlmLoader, llama, captured)
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert gpu.faults == []
    assert gpu.num_replays > 0


@pytest.mark.parametrize("name", first(["mixtral", "llama-biased-tied", "qwen2-window"]))
def test_steps_with_prompts_are_captured_once_they_came_a_few_times(
    gpu: FakeCuda, tmp_path: Path, config: Config, name: str
) -> None:
    family, extra = FAMILIES[name]
    save_family(tmp_path, family, **extra)
    device = DeviceOptions(
        device_graph_capture=True, device_graph_prompts=True, device_graph_rows=(4,)
    )
    run = dry_run(gpu, LlmLoader, tmp_path, replace(config, device=device))
    run.depth = 2
    for index in range(12):
        run.submit(str(index), request(10, GREEDY))
    run.end_well()
    graphs = run.runner._runner._graphs  # type: ignore[attr-defined]
    assert graphs.prompts is not None
    assert any(bucket.chunks for bucket in graphs.steps._steps)
    assert gpu.faults == []


@pytest.mark.gpu
def test_a_grammars_masks_are_read_by_the_kernel_that_samples(gpu: FakeCuda) -> None:
    sampler = Sampler(vocab_size=199, max_batch_size=2, device=CUDA)
    logits_BV = torch.zeros(2, 199, device=CUDA)
    with gpu.launch(), torch.inference_mode():
        sampler.sample(logits_BV, [0, 1], [5, 5], [b"", b"\x07" * 28])
    assert gpu.kernels == {"sample_rows"}
    assert gpu.faults == []


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    save_head(folder, **{name: TINY[name] for name in names}, target_hidden_size=48)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("captures", [False, True])
def test_a_head_that_drafts(
    gpu: FakeCuda, llama: Path, head: Path, config: Config, captures: bool
) -> None:
    config = replace(
        config,
        device=DeviceOptions(device_graph_capture=captures),
        speculation=SpeculationOptions(speculative_algorithm="eagle3", draft_model_path="x"),
    )

    def open_loader(resolved: ResolvedModel, *rest: Any) -> LlmLoader:
        return LlmLoader(structs.replace(resolved, draft=str(head)), *rest)

    run = dry_run(gpu, open_loader, llama, config)
    run.scheduler.tokens.drafting.drafter.costs = FreeDrafts()
    run_together(
        run, *(structs.replace(SAMPLINGS[name], max_tokens=9) for name in ("greedy", "random"))
    )
    assert run.runner.peaks["draft"] > 0


@pytest.mark.gpu
def test_drafts_with_penalties_wait_for_nothing(gpu: FakeCuda) -> None:
    sampler = Sampler(vocab_size=199, max_batch_size=2, device=CUDA)
    sampler.bind(bound_row(0, SamplingParams(seed=1, repetition_penalty=1.1), (1, 2)))
    logits_BV = torch.zeros(4, 199, device=CUDA)
    with gpu.launch(), torch.inference_mode():
        sampler.sample(logits_BV, [1, 0, 0, 0], [5, 5, 6, 7], (), [-1, 3, 4, -1])
    assert gpu.faults == []


def test_a_plain_step_brings_one_thing_back(gpu: FakeCuda, llama: Path, config: Config) -> None:
    run = dry_run(gpu, LlmLoader, llama, config)
    run.submit("a", request(7, GREEDY))
    run.end_well()
    assert {count for counts in run.runner.reads.values() for count in counts} == {1}


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", ["q8_0", "q4_0", "q4_k"])
def test_weights_in_blocks(gpu: FakeCuda, llama: Path, config: Config, encoding: str) -> None:
    models = replace(config.models, quantization_encoding=encoding)
    run = dry_run(gpu, LlmLoader, llama, replace(config, models=models))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert gpu.faults == []


WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}


def as_int4(method: str, num_outputs: int, num_inputs: int) -> dict[str, torch.Tensor]:
    """The tensors of a matrix in groups of 32 inputs."""
    groups, words = num_inputs // 32, {"dtype": torch.int32}
    zeros = torch.zeros(groups, num_outputs // 8, **words)
    scales = torch.ones(groups, num_outputs, dtype=torch.float16)
    if method == "awq":
        packed = torch.zeros(num_inputs, num_outputs // 8, **words)
        return {"qweight": packed, "qzeros": zeros, "scales": scales}
    if method == "gptq":
        packed = torch.zeros(num_inputs // 8, num_outputs, **words)
        table = torch.arange(num_inputs).int() % groups
        return {"qweight": packed, "qzeros": zeros, "scales": scales, "g_idx": table}
    if method == "fp8":
        weight = torch.zeros(num_outputs, num_inputs).to(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale": torch.ones(1)}
    packed = torch.zeros(num_outputs, num_inputs // 8, **words)
    return {"weight_packed": packed, "weight_scale": scales.t().contiguous()}


def store_projections(folder: Path, fields: dict[str, Any], *, has_table: bool = True) -> None:
    """Quantize the projections of a checkpoint; groups in the order of activations by GPTQ."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        made = as_int4(fields["quant_method"], *tensors.pop(name).shape)
        if not has_table:
            made.pop("g_idx", None)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in made.items()}
    save_file(tensors, path)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": fields}))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq_linear"),
        ({"quant_method": "awq", "bits": 4}, "gptq_linear"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "gptq_linear"),
        ({"quant_method": "fp8"}, "fp8_linear"),
    ],
    ids=lambda each: each.get("quant_method") if isinstance(each, dict) else "",
)
def test_weights_as_they_are_stored(
    gpu: FakeCuda, tmp_path: Path, config: Config, fields: dict[str, Any], kernel: str
) -> None:
    """Groups in the order of activations, too."""
    with unset_fake_temporarily():
        save_family(tmp_path, "Llama", **WIDE)
        store_projections(tmp_path, fields)
    run = dry_run(gpu, LlmLoader, tmp_path, config)
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert kernel in gpu.kernels
    assert gpu.faults == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 16 values: libraries take no odd ones."""
    folder = tmp_path_factory.mktemp("wide")
    save_family(folder, "Llama", **WIDE)
    return folder


def with_backend(config: Config, name: str, **options: Any) -> Config:
    return replace(config, device=DeviceOptions(attention_backend=name, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("cells", ["auto", "int8"])
def test_attention_by_torchs_library(
    gpu: FakeCuda, wide: Path, config: Config, captures: bool, cells: str
) -> None:
    models = replace(config.models, dtype="bfloat16")
    cache = CacheOptions(kv_cache_page_size=4, kv_cache_format=cells)
    chosen = with_backend(config, "flash", device_graph_capture=captures)
    run = dry_run(gpu, LlmLoader, wide, replace(chosen, models=models, cache=cache))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert "aten::_flash_attention_forward" in gpu.products
    assert gpu.faults == []


@pytest.mark.parametrize(
    "case",
    [
        ({"dtype": "float32"}, False, "it does not compute in float32"),
        ({}, True, "order is known"),
        ({"model_impl": "transformers"}, False, "does not run on our decoder"),
    ],
)
def test_attention_that_cannot_serve_a_model_is_refused(
    gpu: FakeCuda, wide: Path, config: Config, case: tuple[dict[str, Any], bool, str]
) -> None:
    models, is_deterministic, reason = case
    chosen = with_backend(config, "flash", enable_deterministic_inference=is_deterministic)
    chosen = replace(chosen, models=replace(config.models, **{"dtype": "bfloat16"} | models))
    with pytest.raises(ConfigError, match=rf"^--attention-backend flash: .*{reason}"):
        dry_run(gpu, LlmLoader, wide, chosen)


EXPERTS = {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_experts_as_they_are_stored(
    gpu: FakeCuda, tmp_path: Path, config: Config, method: str
) -> None:
    with unset_fake_temporarily():
        save_family(tmp_path, "Qwen3Moe", **EXPERTS)
        store_projections(tmp_path, {"quant_method": method, "bits": 4}, has_table=False)
    run = dry_run(gpu, LlmLoader, tmp_path, config)
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert "packed_moe_mlp" in gpu.kernels
    assert "moe_mlp" not in gpu.kernels
    assert gpu.faults == []


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 24])
def test_experts_in_blocks(gpu: FakeCuda, tmp_path: Path, config: Config, hidden: int) -> None:
    """Rows of 24 are too short for blocks, and stay plain."""
    with unset_fake_temporarily():
        save_family(tmp_path, "Qwen3Moe", **EXPERTS | {"moe_intermediate_size": hidden})
    models = replace(config.models, quantization_encoding="q8_0")
    run = dry_run(gpu, LlmLoader, tmp_path, replace(config, models=models))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert "packed_moe_mlp" in gpu.kernels
    assert gpu.faults == []


def deterministic(config: Config, **options: Any) -> Config:
    return replace(config, device=DeviceOptions(enable_deterministic_inference=True, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama-biased-tied", "qwen3-moe"])
def test_steps_whose_rows_do_not_depend_on_their_batch(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str
) -> None:
    name, extra = FAMILIES[family]
    save_family(tmp_path, name, **extra)
    run = dry_run(gpu, LlmLoader, tmp_path, deterministic(config))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert "linear" in gpu.kernels
    assert gpu.products == set(), "none of a library's, which chooses by the number of rows"
    assert gpu.num_replays > 0
    assert gpu.faults == []


def test_what_cannot_be_deterministic_is_refused(
    gpu: FakeCuda, llama: Path, config: Config
) -> None:
    models = replace(config.models, model_impl="transformers")
    with pytest.raises(ConfigError, match=r"^--enable-deterministic-inference: .* transformers"):
        dry_run(gpu, LlmLoader, llama, deterministic(replace(config, models=models)))
    with pytest.raises(ConfigError, match=r"^--enable-deterministic-inference: on a GPU tiny"):
        dry_run(gpu, VisionLoader, llama, deterministic(config))


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "extra"), FALLBACKS.values(), ids=FALLBACKS)
def test_models_that_transformers_runs(
    gpu: FakeCuda,
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    extra: dict[str, Any],
) -> None:
    if is_interpreted():  # masks of an absent GPU have no values to compare
        monkeypatch.setattr(proof, "_seen", lambda mask: mask)
        monkeypatch.setattr(proof, "_check_masks", lambda *_: [])
        monkeypatch.setattr(proof, "is_near", lambda found, *_: torch.ones(found.shape[:-1]))
    sizes = {name: value for name, value in TINY.items() if name != "head_dim"}
    kind = getattr(transformers, f"{family}Config")
    getattr(transformers, f"{family}ForCausalLM")(kind(**sizes | extra)).save_pretrained(tmp_path)
    models = replace(config.models, model_impl="transformers", dtype="bfloat16")
    run = dry_run(gpu, LlmLoader, tmp_path, replace(config, models=models))
    run_together(run, GREEDY, SAMPLINGS["random"])
    assert gpu.faults == []

"""Whole models of today's families on a GPU: experts with biases, in MXFP4 too, and states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import unset_fake_temporarily

from support.decoder_families import LATENT, TINY
from support.dense_families import DENSE
from support.dry_run import dry_run
from support.fake_cuda import FakeCuda
from support.mixture_families import save_mixture
from support.recurrent_models import recurrent_model
from support.tiers import first, nightly
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.options.config import Config, DeviceOptions
from triptych.modalities.llm.engine.loader import LlmLoader

pytestmark = pytest.mark.gpu
PAGED = "paged_decode", "paged_prefill"


def run_whole(
    gpu: FakeCuda, folder: Path, config: Config, encoding: str = "auto", **device: bool
) -> set[str]:
    """Prompts in chunks that share steps with decoding rows; returns the kernels called."""
    models = replace(config.models, model_impl="native", quantization_encoding=encoding)
    options = DeviceOptions(**device, device_graph_rows=(4,))
    run = dry_run(gpu, LlmLoader, folder, replace(config, models=models, device=options))
    run.depth = 2
    for index in range(4):
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        ids = tuple(range(3, 8 + 9 * index % 27))
        run.submit(str(index), TokenRequest(prompt_ids=ids, sampling=sampling))
    run.end_well()
    assert gpu.faults == []
    assert gpu.num_replays > 0
    return gpu.kernels


def store_mxfp4_experts(folder: Path) -> None:
    """Store the experts of a gpt-oss checkpoint as its publisher does."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        groups = num_experts, num_outputs, num_inputs // 32
        tensors[f"{name}_blocks"] = torch.zeros(*groups, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(groups, 127, dtype=torch.uint8)
    save_file(tensors, path)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(described))


@pytest.mark.parametrize("is_packed", [False, True])
def test_gpt_oss(gpu: FakeCuda, tmp_path: Path, config: Config, is_packed: bool) -> None:
    with unset_fake_temporarily():
        save_mixture(tmp_path, "gpt-oss", hidden_size=64, intermediate_size=32, head_dim=16)
        if is_packed:
            store_mxfp4_experts(tmp_path)
    device = {"enable_deterministic_inference": is_packed, "device_graph_capture": True}
    encoding = "mxfp4" if is_packed else "auto"  # where few blocks become plain numbers
    kernels = run_whole(gpu, tmp_path, config, encoding, **device)
    assert kernels >= {"route", "paged_decode", "paged_prefill"}
    assert kernels & {"moe_mlp", "packed_moe_mlp"} == {"packed_moe_mlp" if is_packed else "moe_mlp"}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        nightly("granite-hybrid", {"selective_scan", "moe_mlp", *PAGED}),
        ("nemotron-h", {"selective_scan", "moe_mlp", *PAGED}),
        ("falcon-h1", {"selective_scan", "gated", *PAGED}),
        ("qwen3.5", {"delta_rule", "gated", *PAGED}),
        ("kimi-linear", {"delta_rule", "moe_mlp", "latent_write", "latent_decode"}),
    ],
)
def test_layers_with_states(
    gpu: FakeCuda, tmp_path: Path, config: Config, name: str, own: set[str]
) -> None:
    with unset_fake_temporarily():
        recurrent_model(name).save_pretrained(tmp_path)
    kernels = run_whole(gpu, tmp_path, config, device_graph_capture=True)
    assert kernels >= {"short_conv", "gated_norm", *own}


def test_gemma_3n(gpu: FakeCuda, tmp_path: Path, config: Config) -> None:
    """Several residual streams, and sparse activations."""
    kind, own = DENSE["gemma3n"]
    with unset_fake_temporarily():
        sizes = getattr(transformers, f"{kind}Config")(**TINY | own)
        transformers.AutoModelForCausalLM.from_config(sizes).save_pretrained(tmp_path)
    kernels = run_whole(gpu, tmp_path, config, device_graph_capture=True)
    streams = {"predict_streams", "correct_streams", "as_large_as", "relu_above"}
    assert kernels >= {"paged_decode", "paged_prefill", "gated", *streams}


@pytest.mark.parametrize("is_deterministic", first([True, False]))
def test_glm_5(gpu: FakeCuda, tmp_path: Path, config: Config, is_deterministic: bool) -> None:
    """An index of keys, in captured steps too; short rows need no choice of their own."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    index = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 12, "index_topk_freq": 2}
    with unset_fake_temporarily():
        sizes = transformers.GlmMoeDsaConfig(**TINY | LATENT | experts | index)
        transformers.GlmMoeDsaForCausalLM(sizes).save_pretrained(tmp_path)
    device = {"enable_deterministic_inference": is_deterministic, "device_graph_capture": True}
    kernels = run_whole(gpu, tmp_path, config, **device)
    assert kernels >= {"latent_write", "score_keys", "choose_slots", "latent_decode"}


def test_llama_4(gpu: FakeCuda, tmp_path: Path, config: Config) -> None:
    """Chunks of attention, and experts whose inputs are scaled."""
    with unset_fake_temporarily():
        save_mixture(tmp_path, "llama-4", attention_chunk_size=8)
    kernels = run_whole(gpu, tmp_path, config, device_graph_capture=True)
    assert kernels >= {"route", "moe_mlp", "paged_decode", "paged_prefill"}

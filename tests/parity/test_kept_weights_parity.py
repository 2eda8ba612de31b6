"""Quantized checkpoints as transformers' classes, against the same classes with plain weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from support.decoder_rig import CPU, Rig
from support.gguf_families import FAMILIES
from support.gguf_models import SIZES, write_model
from support.kernel_levels import LEVELS, open_kernels
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.block_layers import BlockEmbedding, BlockLinear
from triptych.core.runtime.layers.held_experts import HeldExperts
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.weights.encoding import PLAIN, WeightEncoding
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.llm.engine.fallback import FallbackBlueprint

IDS = [(7 * i) % 90 + 5 for i in range(20)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MIXTURE = {
    **SIZES,
    **EXPERTS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 128,
}
Tensors = dict[str, torch.Tensor]


def float8(weight_OI: torch.Tensor, scale: torch.Tensor) -> Tensors:
    return {"weight": (weight_OI / scale).to(torch.float8_e4m3fn)}


def of_one_scale(weight_OI: torch.Tensor) -> Tensors:
    scale = weight_OI.abs().max() / 400
    return {**float8(weight_OI, scale), "weight_scale": scale.reshape(1)}


def of_channels(weight_OI: torch.Tensor) -> Tensors:
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 400
    return {**float8(weight_OI, scale_O1), "weight_scale": scale_O1}


def of_squares(weight_OI: torch.Tensor) -> Tensors:
    scale = weight_OI.abs().max() / 400
    squares = [-(-size // 128) for size in weight_OI.shape]
    return {**float8(weight_OI, scale), "weight_scale_inv": scale.expand(squares).contiguous()}


def gptq(weight_OI: torch.Tensor) -> Tensors:
    """Four bits with one scale for each output."""
    scale_1O = (weight_OI.abs().amax(1) / 7).half()[None]
    codes_IO = ((weight_OI.t() / scale_1O).round() + 8).clamp(0, 15).to(torch.int64)
    words = sum(codes_IO[place::8] << 4 * place for place in range(8))
    zeros = torch.full((1, weight_OI.shape[0] // 8), 0x77777777, dtype=torch.int32)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return {"qweight": signed.to(torch.int32), "qzeros": zeros, "scales": scale_1O}


SCHEMES = {
    "fp8": ({"quant_method": "fp8"}, of_one_scale),
    "fp8-channels": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        of_channels,
    ),
    "fp8-squares": ({"quant_method": "fp8"}, of_squares),
    "gptq": ({"quant_method": "gptq", "bits": 4, "sym": True}, gptq),
}


def save_mixture(folder: Path, fields: Mapping[str, Any], quantize: Any) -> None:
    """A mixture of Qwen2 whose projections are quantized, except for routers and tables."""
    torch.manual_seed(5)
    config = transformers.Qwen2MoeConfig(**{**MIXTURE, "initializer_range": 0.1})
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        is_plain = not module.endswith("_proj") or part != "weight"
        parts = {part: tensor} if is_plain else quantize(tensor)
        tensors |= {f"{module}.{key}": value.contiguous() for key, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "quantization_config": fields}))


def run(
    checkpoint: Checkpoint, native: NativeKernels | None = None, *, keeps: bool = True
) -> tuple[torch.Tensor, Any]:
    """The logits after some tokens and after one more, and the model of transformers."""
    encoding = WeightEncoding.of("auto", checkpoint.tensors, checkpoint.encoding)
    if not checkpoint.encoding:  # small files are unpacked by default
        encoding = WeightEncoding("auto", encoding.stored)
    sizes: dict[str, Any] = {"max_length": 64, "dtype": torch.float32, "device": CPU}
    encoding = encoding if keeps else PLAIN
    blueprint = FallbackBlueprint(checkpoint.config, **sizes, native=native, encoding=encoding)
    model = blueprint.build(checkpoint, lambda _: None)
    if native is None:
        assert blueprint.weight_bytes() == held_bytes(model.whole)
    rig = Rig(model, blueprint.kv_layout(16, torch.float32))
    row = rig.open(IDS)
    rig.prefill(row)
    rig.decode(row, num_steps=1)
    return torch.stack([row.logits[place] for place in sorted(row.logits)[-2:]]), model.whole


def held_bytes(model: Any) -> int:
    """The bytes of a model's weights; a placeholder of a held weight has none."""
    kinds = BlockLinear | BlockEmbedding | HeldExperts
    held = sum(each.num_bytes for each in model.modules() if isinstance(each, kinds))
    plain = {id(p): p for p in model.parameters() if p.untyped_storage().nbytes() >= p.nbytes}
    return held + sum(p.nbytes for p in plain.values())


@pytest.mark.parametrize(("fields", "quantize"), SCHEMES.values(), ids=SCHEMES)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_checkpoints_of_other_programs(
    fields: Mapping[str, Any], quantize: Any, tmp_path: Path
) -> None:
    save_mixture(tmp_path, fields, quantize)
    with open_checkpoint(tmp_path) as checkpoint:
        plain, _ = run(checkpoint, keeps=False)
        kept, model = run(checkpoint)
        native, _ = run(checkpoint, open_kernels(LEVELS[-1]))
    held = [each for each in model.modules() if isinstance(each, BlockLinear)]
    experts = [each for each in model.modules() if isinstance(each, HeldExperts)]
    assert (len(held), len(experts)) == (2 * 7, 2)
    torch.testing.assert_close(kept, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(native, plain, atol=0.02 * float(plain.abs().max()), rtol=0)


STACKED = ("gpt-oss", "llama4", "gemma4+experts", "granitemoe+shared")
"""Families whose classes have no conversion from a tensor for each expert."""


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_experts_of_gguf_files(name: str, tmp_path: Path) -> None:
    file, own = write_model(FAMILIES[name], name.partition("+")[0], tmp_path)
    with converted(file) as checkpoint:
        logits, _ = run(checkpoint)
    with torch.no_grad():
        expected = own.eval()(torch.tensor([IDS]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt-oss", "nemotron_h_moe", "phi3"])
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_blocks_of_gguf_files(name: str, tmp_path: Path) -> None:
    file, _ = write_model(FAMILIES[name], name, tmp_path, kind=Kind.Q8_0)
    with converted(file) as checkpoint:
        plain, _ = run(checkpoint, keeps=False)
        kept, model = run(checkpoint)
    assert any(isinstance(each, BlockLinear) for each in model.modules())
    torch.testing.assert_close(kept, plain, atol=0.02 * float(plain.abs().max()), rtol=0)


def converted(file: Path) -> Checkpoint:
    folder = file.with_suffix("")
    folder.mkdir()
    convert_gguf(file, folder, SilentProgress())
    return Checkpoint.open(folder)

"""Stacked experts as a tensor for each, in every layout of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import FLOAT4
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.runtime.tensors.stacked import ALTERNATING, StackedNames, split_experts

EXPERTS, FEATURES, HIDDEN = 3, 6, 64
PREFIX = "model.layers.0.mlp."
GRANITE = StackedNames(
    gate_up="input_linear.weight", down="output_linear.weight", is_transposed=False
)


def saved(folder: Path, tensors: Mapping[str, torch.Tensor], quantized_by: str = "") -> Path:
    config = {"quantization_config": {"quant_method": quantized_by}} if quantized_by else {}
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named | {"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("layout", ["gpt-oss", "llama4", "granite"])
def test_each_expert_has_its_own_tensors(layout: str, tmp_path: Path) -> None:
    names = {"gpt-oss": ALTERNATING, "llama4": StackedNames(), "granite": GRANITE}[layout]
    gate_up, down = random(EXPERTS, 2 * FEATURES, HIDDEN), random(EXPERTS, HIDDEN, FEATURES)
    bias = random(EXPERTS, 2 * FEATURES)
    stored = {
        names.gate_up: gate_up.mT if names.is_transposed else gate_up,
        names.down: down.mT if names.is_transposed else down,
    }
    if layout == "gpt-oss":
        stored[f"{names.gate_up}_bias"] = bias
    gate = slice(0, None, 2) if names.alternates else slice(0, FEATURES)
    up = slice(1, None, 2) if names.alternates else slice(FEATURES, None)
    with Checkpoint.open(saved(tmp_path, stored)) as checkpoint:
        split = split_experts(checkpoint, names)
        assert split_experts(split, names).tensors.keys() == split.tensors.keys()
        assert len(split.tensors) == EXPERTS * (5 if layout == "gpt-oss" else 3) + 1
        for expert in range(EXPERTS):
            at = f"{PREFIX}experts.{expert}."
            found = {name: split.read(f"{at}{name}_proj.weight") for name in ("gate", "up", "down")}
            assert torch.equal(found["gate"], gate_up[expert, gate])
            assert torch.equal(found["up"], gate_up[expert, up])
            assert torch.equal(found["down"], down[expert])
            for name, tensor in found.items():
                assert split.tensors[f"{at}{name}_proj.weight"].shape == tensor.shape
            if layout == "gpt-oss":
                assert torch.equal(split.read(f"{at}up_proj.bias"), bias[expert, up])


def mxfp4(*shape: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks and exponents of a random tensor, and its values."""
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 16, shape, generator=generator)
    exponents = torch.randint(118, 126, (*shape[:-1], shape[-1] // 32), generator=generator)
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    values = torch.tensor(FLOAT4)[codes & 7] * torch.where(codes > 7, -1, 1)
    scaled = values * torch.exp2(exponents - 127.0).repeat_interleave(32, -1)
    blocks = pairs.unflatten(-1, (-1, 16))
    return {"_blocks": blocks, "_scales": exponents.to(torch.uint8)}, scaled


def test_mxfp4_stays_as_it_is_stored(tmp_path: Path) -> None:
    parts, values = mxfp4(EXPERTS, 2 * FEATURES, HIDDEN)
    stored = {f"experts.gate_up_proj{end}": tensor for end, tensor in parts.items()}
    with open_checkpoint(saved(tmp_path, stored, "mxfp4")) as checkpoint:
        name = f"{PREFIX}experts.2.up_proj.weight"
        packed = checkpoint.read_packed(name)
        assert packed is not None
        assert packed.format is FORMATS["mxfp4"]
        assert checkpoint.tensors[name].format == "mxfp4"
        assert checkpoint.tensors[name].shape == packed.shape == (FEATURES, HIDDEN)
        assert torch.equal(packed.dequantize(torch.float32), values[2, 1::2])
        assert torch.equal(checkpoint.read(name).float(), values[2, 1::2])
        assert len(checkpoint.tensors) == 2 * EXPERTS + 1
        assert "quantization_config" not in checkpoint.config


def test_exponents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    parts, _ = mxfp4(EXPERTS, 2 * FEATURES, HIDDEN)
    parts["_scales"] = parts["_scales"][:, :, :1]
    stored = {f"experts.gate_up_proj{end}": tensor for end, tensor in parts.items()}
    with (
        open_checkpoint(saved(tmp_path, stored, "mxfp4")) as checkpoint,
        pytest.raises(WeightsError, match=r"gate_up_proj_scales.*does not fit"),
    ):
        checkpoint.read(f"{PREFIX}experts.0.gate_proj.weight")


@pytest.mark.parametrize("parts", [(1, 1), (2, 1), (3, 2)], ids=["one", "gate and up", "squares"])
def test_fp8_with_scales_of_parts(parts: tuple[int, int], tmp_path: Path) -> None:
    """Of squares of 128, some lie in the gate and in the up projection."""
    rows, columns = 384, 256
    codes, scales = random(EXPERTS, rows, columns).to(torch.float8_e4m3fn), random(EXPERTS, *parts)
    steps = [128, 128] if parts == (3, 2) else [rows // parts[0], columns]
    spread = scales.repeat_interleave(steps[0], 1).repeat_interleave(steps[1], 2)
    stored = {
        "experts.gate_up_proj": codes,
        "experts.gate_up_proj_scale_inv": scales,
        "experts.gate_up_proj_activation_scale": torch.ones(EXPERTS),
    }
    with open_checkpoint(saved(tmp_path, stored, "fp8")) as checkpoint:
        split = split_experts(checkpoint, StackedNames(is_transposed=False))
        assert len(split.tensors) == 2 * EXPERTS + 1
        name = f"{PREFIX}experts.2.up_proj.weight"
        assert split.tensors[name].format == "q8_0"
        wanted = (codes.float() * spread)[2, rows // 2 :]
        torch.testing.assert_close(split.read(name).float(), wanted, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("num_inputs", "parts", "message"),
    [(32, (3, 1), "does not fit"), (32, (0, 1), "does not fit"), (40, (1, 1), "whole groups")],
)
def test_fp8_that_does_not_fit_is_refused(
    tmp_path: Path, num_inputs: int, parts: tuple[int, int], message: str
) -> None:
    codes, scales = torch.ones(EXPERTS, 8, num_inputs), torch.ones(EXPERTS, *parts)
    stored = {"experts.gate_up_proj": codes.to(torch.float8_e4m3fn)}
    folder = saved(tmp_path, stored | {"experts.gate_up_proj_scale_inv": scales}, "fp8")
    with open_checkpoint(folder) as checkpoint, pytest.raises(WeightsError, match=message):
        split_experts(checkpoint, StackedNames(is_transposed=False)).read(
            f"{PREFIX}experts.0.up_proj.weight"
        )

"""Checkpoints of GPTQ, AWQ, compressed-tensors and fp8, written here by their formats' rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.packed_linear import Float8Weight
from triptych.core.runtime.kernels.triton.gptq_linear import dequantize
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.runtime.tensors.quantize import quantize_blocks

NUM_INPUTS, NUM_OUTPUTS, GROUP = 128, 16, 64
NUM_GROUPS = NUM_INPUTS // GROUP
Tensors = Mapping[str, torch.Tensor]


def random_ints(*shape: int, below: int = 16) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


CODES_IO = random_ints(NUM_INPUTS, NUM_OUTPUTS)
ZEROS_GO = 1 + random_ints(NUM_GROUPS, NUM_OUTPUTS, below=15)
SCALES_GO = (0.01 * (1 + random_ints(NUM_GROUPS, NUM_OUTPUTS))).half()


def words(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of four bits a word: number `order[i]` of eight at bit 4 i."""
    packed = 0
    for place, column in enumerate(order):
        index = torch.arange(column, values.shape[dim], 8)
        packed = packed | values.index_select(dim, index) << 4 * place
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def values_of(zeros_GO: torch.Tensor) -> torch.Tensor:
    zeros_IO, scales_IO = (each.repeat_interleave(GROUP, 0) for each in (zeros_GO, SCALES_GO))
    return ((CODES_IO - zeros_IO) * scales_IO.float()).T


def saved(folder: Path, fields: Mapping[str, Any], tensors: Tensors) -> Path:
    config = {"model_type": "llama", "quantization_config": dict(fields)}
    (folder / "config.json").write_text(json.dumps(config))
    beside = {"norm.weight": torch.ones(4, dtype=torch.float16)}
    named = {f"a.b.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(beside | named, folder / "model.safetensors")
    return folder


def read(folder: Path) -> tuple[torch.Tensor, str]:
    """The one matrix, and the format it is held in."""
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == {"a.b.weight", "norm.weight"}
        assert "quantization_config" not in checkpoint.config
        assert checkpoint.dtype is torch.float16 or not checkpoint.encoding.startswith("gptq")
        packed, info = checkpoint.read_packed("a.b.weight"), checkpoint.tensors["a.b.weight"]
        assert packed is not None
        assert packed.shape == info.shape
        assert packed.format.name == info.format
        assert packed.blocks_OB.nbytes == info.num_bytes
        return packed.dequantize(torch.float32), info.format


def held_on_a_gpu(folder: Path) -> torch.Tensor:
    """The values of the one matrix as a GPU holds it."""
    with open_checkpoint(folder) as checkpoint:
        weight = checkpoint.read_stored("a.b.weight")
        assert checkpoint.read_stored("norm.weight") is None
        assert weight is not None
        assert weight.shape == checkpoint.tensors["a.b.weight"].shape
    if isinstance(weight, Float8Weight):
        scale = weight.scale.view(-1, 1)
        if weight.scale.dim() == 2:
            scale = weight.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = scale[: len(weight.weight_OI)]
        return weight.weight_OI.float() * scale
    tensors = weight.qweight, weight.scales_RO, weight.zeros, weight.group_of_input_I
    return dequantize(*tensors, weight.layout).t()


def gptq(zeros_GO: torch.Tensor, offset: int = 1) -> Tensors:
    return {
        "qweight": words(CODES_IO, 0),
        "qzeros": words(zeros_GO - offset, 1),
        "scales": SCALES_GO,
        "g_idx": torch.arange(NUM_INPUTS, dtype=torch.int32) // GROUP,
    }


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_gptq(checkpoint_format: str, tmp_path: Path) -> None:
    fields = {"quant_method": "gptq", "bits": 4, "checkpoint_format": checkpoint_format}
    tensors = gptq(ZEROS_GO, offset=int(checkpoint_format == "gptq"))
    values, form = read(saved(tmp_path, fields, tensors))
    assert form == "q4_1"
    torch.testing.assert_close(values, values_of(ZEROS_GO), atol=2e-3, rtol=0)
    torch.testing.assert_close(held_on_a_gpu(tmp_path), values_of(ZEROS_GO))


def test_symmetric_gptq_is_exact(tmp_path: Path) -> None:
    zeros_GO = torch.full_like(ZEROS_GO, 8)
    fields = {"quant_method": "gptq", "bits": 4, "sym": True}
    values, form = read(saved(tmp_path, fields, gptq(zeros_GO)))
    assert form == "q4_0"
    assert torch.equal(values, values_of(zeros_GO))
    assert torch.equal(held_on_a_gpu(tmp_path), values)


def test_groups_in_another_order_are_for_a_gpu(tmp_path: Path) -> None:
    tensors = {**gptq(ZEROS_GO), "g_idx": torch.arange(NUM_INPUTS, dtype=torch.int32) % NUM_GROUPS}
    folder = saved(tmp_path, {"quant_method": "gptq", "bits": 4}, tensors)
    with pytest.raises(WeightsError, match="desc_act"):
        read(folder)
    zeros_IO, scales_IO = (each.repeat(GROUP, 1) for each in (ZEROS_GO, SCALES_GO))
    torch.testing.assert_close(held_on_a_gpu(folder), ((CODES_IO - zeros_IO) * scales_IO.float()).T)


def test_awq(tmp_path: Path) -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(CODES_IO, 1, order),
        "qzeros": words(ZEROS_GO, 1, order),
        "scales": SCALES_GO,
    }
    fields = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    values, _ = read(saved(tmp_path, fields, tensors))
    torch.testing.assert_close(values, values_of(ZEROS_GO), atol=2e-3, rtol=0)
    torch.testing.assert_close(held_on_a_gpu(tmp_path), values_of(ZEROS_GO))


def compressed(form: str) -> dict[str, str]:
    return {"quant_method": "compressed-tensors", "format": form}


def test_compressed_tensors_of_4_bits(tmp_path: Path) -> None:
    tensors = {
        "weight_packed": words(CODES_IO.T, 1),
        "weight_scale": SCALES_GO.T,
        "weight_shape": torch.tensor([NUM_OUTPUTS, NUM_INPUTS]),
    }
    values, _ = read(saved(tmp_path, compressed("pack-quantized"), tensors))
    assert torch.equal(values, values_of(torch.full_like(ZEROS_GO, 8)))
    assert torch.equal(held_on_a_gpu(tmp_path), values)


def test_compressed_tensors_of_8_bits(tmp_path: Path) -> None:
    codes_OI = random_ints(NUM_OUTPUTS, NUM_INPUTS, below=255) - 127
    scales_O1 = SCALES_GO[0, :, None]
    tensors = {"weight": codes_OI.to(torch.int8), "weight_scale": scales_O1}
    values, _ = read(saved(tmp_path, compressed("int-quantized"), tensors))
    assert torch.equal(values, codes_OI * scales_O1.float())


@pytest.mark.parametrize("shape", [(1,), (NUM_OUTPUTS, 1), (1, 2)])
def test_fp8(shape: tuple[int, ...], tmp_path: Path) -> None:
    """With a scale for all, for each output, and for squares of 128."""
    generator = torch.Generator().manual_seed(1)
    weight_OI = torch.randn(NUM_OUTPUTS, 256, generator=generator)
    stored, scales = weight_OI.to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    is_square = shape == (1, 2)
    name = "weight_scale_inv" if is_square else "weight_scale"
    tensors = {"weight": stored, name: scales}
    values, _ = read(saved(tmp_path, {"quant_method": "fp8"}, tensors))
    spread = scales.repeat_interleave(128, 1) if is_square else scales.reshape(-1, 1)
    expected = stored.float() * spread
    own_error = (stored.float() - weight_OI).norm() / weight_OI.norm()
    assert (values - expected).norm() < 0.4 * own_error * expected.norm()
    assert torch.equal(held_on_a_gpu(tmp_path), expected)


@pytest.mark.parametrize("scales", [{}, {"weight_scale_inv": torch.ones(1, 4)}])
def test_fp8_without_scales_or_with_those_of_other_squares_is_refused(
    scales: Tensors, tmp_path: Path
) -> None:
    weight = torch.ones(NUM_OUTPUTS, 256).to(torch.float8_e4m3fn)
    folder = saved(tmp_path, {"quant_method": "fp8"}, {"weight": weight, **scales})
    with pytest.raises(WeightsError, match=r"'a\.b\.weight' in model\.safetensors is not usable"):
        read(folder)


def float4(codes_OI: torch.Tensor) -> torch.Tensor:
    """A sign, two bits of exponent, one of mantissa; the smallest exponent has no leading one."""
    exponents, mantissas = (codes_OI >> 1 & 3).float(), (codes_OI & 1).float()
    large = (1 + mantissas / 2) * torch.exp2(exponents - 1)
    return torch.where(exponents == 0, mantissas / 2, large) * torch.where(codes_OI > 7, -1, 1)


MODEL_OPTIMIZER = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "modelopt"])
def test_fp4(form: str, tmp_path: Path) -> None:
    """With scales in float8 for 16 inputs and one for all, or powers of two for 32 inputs."""
    codes_OI = random_ints(NUM_OUTPUTS, NUM_INPUTS)
    packed = (codes_OI[:, ::2] | codes_OI[:, 1::2] << 4).to(torch.uint8)
    scales_OG = (1.0 + random_ints(NUM_OUTPUTS, NUM_INPUTS // 16, below=200)).to(
        torch.float8_e4m3fn
    )
    powers_OG = 120 + random_ints(NUM_OUTPUTS, NUM_INPUTS // 32)
    fields: dict[str, Any] = compressed(f"{form}-pack-quantized")
    if form == "mxfp4":
        tensors = {"weight_packed": packed, "weight_scale": powers_OG.to(torch.uint8)}
        scales = torch.exp2(powers_OG - 127.0)
    elif form == "nvfp4":
        tensors = {"weight_packed": packed, "weight_scale": scales_OG}
        tensors["weight_global_scale"] = torch.tensor([3000.0])
        scales = scales_OG.float() / 3000
    else:
        fields = MODEL_OPTIMIZER
        tensors = {
            "weight": packed,
            "weight_scale": scales_OG,
            "weight_scale_2": torch.tensor(0.01),
        }
        scales = scales_OG.float() * 0.01
    values, held_in = read(saved(tmp_path, fields, tensors))
    expected = float4(codes_OI) * scales.repeat_interleave(NUM_INPUTS // scales.shape[1], 1)
    assert held_in == ("mxfp4" if form == "mxfp4" else "q8_0")
    if form == "mxfp4":
        assert torch.equal(values, expected)
        return
    assert torch.equal(values, quantize_blocks(expected, FORMATS["q8_0"]).dequantize(torch.float32))
    assert (values - expected).norm() < 0.01 * expected.norm()


def test_model_optimizer_may_say_so_in_a_file_of_its_own(tmp_path: Path) -> None:
    """And matrices that it left plain stay so."""
    packed = random_ints(NUM_OUTPUTS, NUM_INPUTS // 2, below=256).to(torch.uint8)
    scales = torch.ones(NUM_OUTPUTS, NUM_INPUTS // 16).to(torch.float8_e4m3fn)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(1.0)}
    folder = saved(tmp_path, {}, tensors)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    values, _ = read(folder)
    assert values.shape == (NUM_OUTPUTS, NUM_INPUTS)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read_packed("norm.weight") is None
        assert checkpoint.encoding == "float4_e2m1fnx2"


def test_fp4_without_its_scale_for_all_is_refused(tmp_path: Path) -> None:
    packed = random_ints(NUM_OUTPUTS, NUM_INPUTS // 2, below=256).to(torch.uint8)
    scales = torch.ones(NUM_OUTPUTS, NUM_INPUTS // 16).to(torch.float8_e4m3fn)
    folder = saved(tmp_path, MODEL_OPTIMIZER, {"weight": packed, "weight_scale": scales})
    with pytest.raises(WeightsError, match=r"'a\.b\.weight' in model\.safetensors is not usable"):
        read(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "compressed-tensors", "format": "naive-quantized"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    ],
)
def test_others_are_refused(fields: Mapping[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"AWQ weights|not supported"):
        read(saved(tmp_path, fields, gptq(ZEROS_GO)))

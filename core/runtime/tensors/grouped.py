"""Checkpoints with matrices quantized in groups: GPTQ, AWQ, fp8, fp4.

These include compressed-tensors and ModelOpt. Owns the meaning of their tensors, and their
conversion to blocks of `core.block_formats` at reading: 4 bits with a scale and a zero for a group
are Q4_0 or Q4_1, whose groups are of 32; integers of 8 bits are Q8_0. fp8 also becomes Q8_0, whose
error is a few times smaller than its own, and so does fp4, in twice the bytes. One set of kernels
therefore serves all of them. Weights of 4 bits in groups of 128 take a tenth more than in the file.

A GPU has kernels for 4 bits and fp8 as they are stored (`read_stored`): no more memory than in the
file, groups in any order, and fp8 matrix units where the GPU has them.

Formats: AutoGPTQ's and AutoAWQ's packing, github.com/vllm-project/compressed-tensors,
github.com/NVIDIA/Model-Optimizer; fp4 (e2m1) is that of the OCP Microscaling Formats 1.0.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import FLOAT4, PackedTensor
from triptych.core.runtime.kernels.packed_linear import Float8Weight, Int4Weight, StoredWeight
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.float8 import float8_blocks, float8_scales
from triptych.core.runtime.tensors.mxfp4 import mxfp4_blocks
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.runtime.tensors.stacked import ALTERNATING, ExpertCheckpoint
from triptych.core.weights.layout import TensorInfo, read_json_if_there

_BLOCK = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Bit places, in fours, of the eight columns in a word of AWQ."""
_SMALL_TYPES = ("I8", "U8", "F8_E4M3")
Parts = Mapping[str, torch.Tensor]
AnyWeight = TypeVar("AnyWeight", PackedTensor, StoredWeight)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """One way of storing a matrix `X.weight`: as tensor X.`main` and further ones.

    `pack` makes blocks of the type `format` from them; `keep` keeps them as they are, for a GPU.
    `shape` computes the matrix's shape from the main tensor's. `name` is the value of
    `--quantization-encoding` for it, where there is one.
    """

    name: str
    main: str
    others: tuple[str, ...]
    format: str
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    pack: Callable[[Parts], PackedTensor]
    keep: Callable[[Parts], StoredWeight] | None = None


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open as `Checkpoint.open`; quantized checkpoints as blocks. Raises `WeightsError`."""
    checkpoint = Checkpoint.open(folder)
    fields = checkpoint.config.get("quantization_config") or _model_optimizer(checkpoint.folder)
    if not fields:
        return checkpoint
    if isinstance(fields, dict) and fields.get("quant_method") == "mxfp4":
        del checkpoint.config["quantization_config"]
        return ExpertCheckpoint(checkpoint, ALTERNATING)
    return GroupedCheckpoint(checkpoint, _scheme_of(fields))


def _model_optimizer(folder: Path) -> dict[str, Any] | None:
    """Read ModelOpt's own file, for checkpoints whose config.json has no quantization."""
    fields = read_json_if_there(folder / "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt"} | fields if isinstance(fields, dict) else None


class GroupedCheckpoint(Checkpoint):
    """A checkpoint whose quantized matrices appear as tensors in blocks, named `X.weight`."""

    def __init__(self, stored: Checkpoint, scheme: _Scheme) -> None:
        config = {name: v for name, v in stored.config.items() if name != "quantization_config"}
        super().__init__(stored.folder, stored.tensors, config)
        self.encoding = scheme.name
        self._scheme = scheme
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        self.tensors = self._as_blocks(stored.tensors)

    def read_packed(self, name: str) -> PackedTensor | None:
        """Read a quantized matrix in blocks; `None` for any other tensor. Raises `WeightsError`."""
        if name not in self._parts:
            return super().read_packed(name)
        return self._read(name, self._scheme.pack)

    def read_stored(self, name: str) -> StoredWeight | None:
        """Read a quantized matrix as stored; `None` for any other tensor, or one better in blocks.

        Raises `WeightsError`.
        """
        keep = self._scheme.keep
        return None if keep is None or name not in self._parts else self._read(name, keep)

    def _read(self, name: str, make: Callable[[Parts], AnyWeight]) -> AnyWeight:
        parts = self._parts[name]
        try:
            return make({part: self._map(info) for part, info in parts.items()})
        except WeightsError:
            raise
        except (ArithmeticError, RuntimeError, ValueError, KeyError) as error:
            info = parts[self._scheme.main]
            raise WeightsError(f"Tensor {info.name!r} in {info.file} is not usable.") from error

    def _as_blocks(self, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        scheme, tensors = self._scheme, dict(stored)
        for name, info in stored.items():
            prefix, _, part = name.rpartition(".")
            if part != scheme.main or (part == "weight" and info.dtype not in _SMALL_TYPES):
                continue
            found = {part: tensors.pop(name)}
            for other in scheme.others:
                if (tensor := tensors.pop(f"{prefix}.{other}", None)) is not None:
                    found[other] = tensor
            shape = scheme.shape(info.shape)
            if len(shape) != 2 or not FORMATS[scheme.format].holds(shape[1]):
                raise WeightsError(
                    f"Tensor {name!r} in {info.file} is not a matrix of whole groups."
                )
            self._parts[f"{prefix}.weight"] = found
            tensors[f"{prefix}.weight"] = TensorInfo(
                f"{prefix}.weight", shape, "U8", info.file, scheme.format
            )
        return tensors


def _scheme_of(fields: Any) -> _Scheme:
    """The scheme of a `quantization_config`. Raises `WeightsError` for an unknown one."""
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if method in ("gptq", "awq") and fields.get("bits", fields.get("w_bit")) == 4:
        if method == "awq" and fields.get("version", "gemm") != "gemm":
            raise WeightsError("config.json: AWQ weights are supported in version gemm only.")
        offset = int(fields.get("checkpoint_format", "gptq") != "gptq_v2")
        return _AWQ if method == "awq" else _gptq_scheme(offset, fields.get("sym") is True)
    if method == "fp8":
        return _FP8
    if method == "modelopt" and fields.get("quant_algo") in _MODEL_OPTIMIZER:
        return _MODEL_OPTIMIZER[fields["quant_algo"]]
    if method == "compressed-tensors" and fields.get("format") in _COMPRESSED:
        return _COMPRESSED[fields["format"]]
    raise WeightsError(
        f"config.json asks for the quantization_config {method!r:.40}, which is not supported in"
        " this form. Supported: 4 bits by gptq and awq, fp8, modelopt's"
        f" {' and '.join(_MODEL_OPTIMIZER)}, and compressed-tensors with the formats"
        f" {', '.join(_COMPRESSED)}."
    )


def _nibbles(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The eight 4-bit codes of 32-bit words, lowest first, along a new dimension."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[dim] = 8
    return (words.unsqueeze(dim) >> shifts.view(shape)).bitwise_and(15).to(torch.uint8)


def _four_bits(
    codes_OI: torch.Tensor, scales_OG: torch.Tensor, zeros_OG: torch.Tensor | None
) -> PackedTensor:
    """Pack scale * (code - zero) in blocks; if all zeros are 8, that is Q4_0."""
    num_outputs, num_inputs = codes_OI.shape
    repeats = num_inputs // _BLOCK // scales_OG.shape[1]

    def of_blocks(values_OG: torch.Tensor) -> torch.Tensor:
        halves = values_OG.half().repeat_interleave(repeats, dim=1)[..., None]
        return halves.contiguous().view(torch.uint8)

    low, high = codes_OI.view(num_outputs, -1, 2, _BLOCK // 2).unbind(2)
    parts = [of_blocks(scales_OG), low | high << 4]
    if zeros_OG is not None:
        parts.insert(1, of_blocks(-scales_OG.float() * zeros_OG))
    form = FORMATS["q4_0" if zeros_OG is None else "q4_1"]
    return PackedTensor(torch.cat(parts, dim=2).view(num_outputs, -1), form)


def _gptq(parts: Parts, offset: int, is_symmetric: bool) -> PackedTensor:
    if _group_table(parts) is not None:
        raise WeightsError(
            "The checkpoint's groups are in the order of activations (desc_act),"
            " which only the GPU kernels support; use a checkpoint without it."
        )
    codes_OI = _nibbles(parts["qweight"], 1).flatten(0, 1).t().contiguous()
    return _four_bits(codes_OI, parts["scales"].t(), _gptq_zeros(parts, offset, is_symmetric))


def _keep_gptq(parts: Parts, offset: int, is_symmetric: bool) -> Int4Weight:
    zeros_OG = _gptq_zeros(parts, offset, is_symmetric)
    return Int4Weight(
        parts["qweight"],
        parts["scales"],
        None if zeros_OG is None else parts["qzeros"],
        _group_table(parts),
        "gptq" if offset else "gptq_v2",
    )


def _gptq_zeros(parts: Parts, offset: int, is_symmetric: bool) -> torch.Tensor | None:
    """The zeros `[O, G]`; `None` for symmetric groups. Raises `ValueError` if those have others."""
    zeros_OG = _nibbles(parts["qzeros"], 2).flatten(1).t().float() + offset
    if not is_symmetric:
        return zeros_OG
    if not (zeros_OG == 8).all():
        raise ValueError("its zeros are not symmetric though the config says so")
    return None


def _group_table(parts: Parts) -> torch.Tensor | None:
    """The group of each input, where groups are not consecutive inputs."""
    if "g_idx" not in parts:
        return None
    num_inputs, num_groups = 8 * len(parts["qweight"]), len(parts["scales"])
    in_order = torch.arange(num_inputs, dtype=torch.int32) // (num_inputs // num_groups)
    table_I = parts["g_idx"].to(torch.int32)
    if table_I.shape != in_order.shape or not ((table_I >= 0) & (table_I < num_groups)).all():
        raise ValueError("its groups of inputs have no scales")
    return None if torch.equal(table_I, in_order) else table_I


def _awq(parts: Parts) -> PackedTensor:
    order = torch.tensor(_AWQ_ORDER)
    codes_OI = _nibbles(parts["qweight"], 2)[..., order].flatten(1).t().contiguous()
    zeros_OG = _nibbles(parts["qzeros"], 2)[..., order].flatten(1).t().float()
    return _four_bits(codes_OI, parts["scales"].t(), zeros_OG)


def _keep_awq(parts: Parts) -> Int4Weight:
    return Int4Weight(parts["qweight"], parts["scales"], parts["qzeros"], None, "awq")


def _check_symmetric(parts: Parts) -> None:
    if "weight_zero_point" in parts or "weight_g_idx" in parts:
        raise WeightsError(
            "of compressed-tensors' 4 bits only symmetric groups in order are supported."
        )


def _keep_packed(parts: Parts) -> Int4Weight:
    """Keep the words, which are GPTQ's transposed."""
    _check_symmetric(parts)
    words, scales = parts["weight_packed"].t(), parts["weight_scale"].t()
    return Int4Weight(words, scales, None, None, "gptq_v2")


def _pack_quantized(parts: Parts) -> PackedTensor:
    _check_symmetric(parts)
    return _four_bits(_nibbles(parts["weight_packed"], 2).flatten(1), parts["weight_scale"], None)


def _whole_bytes(parts: Parts) -> PackedTensor:
    """Pack signed bytes with a scale for each output, or for all."""
    codes_OI, num_outputs = parts["weight"], len(parts["weight"])
    scales = parts["weight_scale"].reshape(-1, 1, 1).half()
    blocks = codes_OI.view(num_outputs, -1, _BLOCK).view(torch.uint8)
    scales = scales.expand(num_outputs, blocks.shape[1], 1).contiguous().view(torch.uint8)
    packed = torch.cat((scales, blocks), dim=2).view(num_outputs, -1)
    return PackedTensor(packed, FORMATS["q8_0"])


def _keep_float8(parts: Parts) -> Float8Weight:
    return Float8Weight(parts["weight"], _float8_scales(parts).contiguous())


def _float8_scales(parts: Parts) -> torch.Tensor:
    scales = parts["weight_scale" if "weight_scale" in parts else "weight_scale_inv"]
    return float8_scales(parts["weight"].shape, scales)


def _eight_bit_floats(parts: Parts) -> PackedTensor:
    """Pack fp8 with a scale for all, for each output, or for squares of 128."""
    return float8_blocks(parts["weight"], _float8_scales(parts))


def _four_bit_floats(parts: Parts) -> PackedTensor:
    """Pack fp4 with float8 scales of 16 inputs and a common one."""
    _check_symmetric(parts)
    packed_OB = parts["weight_packed" if "weight_packed" in parts else "weight"].view(torch.uint8)
    magnitudes = torch.tensor(FLOAT4)
    values = torch.cat((magnitudes, -magnitudes))
    codes_OI = torch.stack((packed_OB & 15, packed_OB >> 4), dim=2).flatten(1)
    weight_OI = values.index_select(0, codes_OI.flatten().int()).view(codes_OI.shape)
    scales_OG = _four_bit_scales(parts)
    grouped_OGI = weight_OI.unflatten(1, (scales_OG.shape[1], -1)) * scales_OG[..., None]
    return quantize_blocks(grouped_OGI.flatten(1), FORMATS["q8_0"])


def _four_bit_scales(parts: Parts) -> torch.Tensor:
    scales_OG = parts["weight_scale"]
    if "weight_scale_2" in parts:
        return scales_OG.float() * parts["weight_scale_2"].float()
    return scales_OG.float() / parts["weight_global_scale"].float()


def _four_bit_powers(parts: Parts) -> PackedTensor:
    """Pack fp4 with powers of two as scales of 32 inputs."""
    _check_symmetric(parts)
    return mxfp4_blocks(parts["weight_packed"], parts["weight_scale"])


def _same(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def _gptq_scheme(offset: int, is_symmetric: bool) -> _Scheme:
    """GPTQ's scheme; zeros are stored less `offset`."""
    return _Scheme(
        "gptq",
        "qweight",
        ("qzeros", "scales", "g_idx"),
        "q4_0" if is_symmetric else "q4_1",
        lambda shape: (shape[1], 8 * shape[0]),
        lambda parts: _gptq(parts, offset, is_symmetric),
        lambda parts: _keep_gptq(parts, offset, is_symmetric),
    )


def _float4_scheme(
    main: str,
    others: tuple[str, ...],
    form: str = "q8_0",
    pack: Callable[[Parts], PackedTensor] = _four_bit_floats,
) -> _Scheme:
    return _Scheme(
        "float4_e2m1fnx2", main, others, form, lambda shape: (shape[0], 2 * shape[1]), pack
    )


_AWQ = _Scheme(
    "awq",
    "qweight",
    ("qzeros", "scales"),
    "q4_1",
    lambda shape: (8 * shape[1], shape[0]),
    _awq,
    _keep_awq,
)
_FP8 = _Scheme(
    "float8_e4m3fn",
    "weight",
    ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale"),
    "q8_0",
    _same,
    _eight_bit_floats,
    _keep_float8,
)
_MODEL_OPTIMIZER: Mapping[str, _Scheme] = MappingProxyType(
    {
        "FP8": _FP8,
        "NVFP4": _float4_scheme("weight", ("weight_scale", "weight_scale_2", "input_scale")),
    }
)
_COMPRESSED: Mapping[str, _Scheme] = MappingProxyType(
    {
        "pack-quantized": _Scheme(
            "int4",
            "weight_packed",
            ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
            "q4_0",
            lambda shape: (shape[0], 8 * shape[1]),
            _pack_quantized,
            _keep_packed,
        ),
        "int-quantized": _Scheme(
            "int8", "weight", ("weight_scale", "input_scale"), "q8_0", _same, _whole_bytes
        ),
        "float-quantized": _FP8,
        "nvfp4-pack-quantized": _float4_scheme(
            "weight_packed",
            ("weight_scale", "weight_global_scale", "input_global_scale", "weight_zero_point"),
        ),
        "mxfp4-pack-quantized": _float4_scheme(
            "weight_packed", ("weight_scale", "weight_zero_point"), "mxfp4", _four_bit_powers
        ),
    }
)

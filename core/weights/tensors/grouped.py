"""Checkpoints whose matrices are small numbers in groups: GPTQ's, AWQ's, compressed-tensors', fp8.

Owns what their tensors mean, and how they become blocks of `core.block_formats` as they are read:
4 bits with a scale and a zero for a group are Q4_0 or Q4_1, whose groups are of 32; whole numbers
of 8 bits are Q8_0. fp8 becomes Q8_0, too, whose error is a few times smaller than its own. So one
set of kernels serves all of them. Weights in groups of 128 take a tenth more than in the file.

Formats: AutoGPTQ's and AutoAWQ's packing, github.com/vllm-project/compressed-tensors.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.kernels.dequantise import PackedTensor
from triptych.core.weights.layout import TensorInfo
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.quantise import quantise

_BLOCK = 32
_SQUARE = 128  # side of what shares a scale in fp8 of blocks
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ's the eight columns are, in fours of bits."""
Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Scheme:
    """One way of storing a matrix `X.weight`: as tensors X.`main` and others beside it.

    `format` is what it becomes, of `pack`'s making; `shape` is read off the main tensor's. The
    `name` is as `--quantization-encoding` says it, where it can.
    """

    name: str
    main: str
    others: tuple[str, ...]
    format: str
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    pack: Callable[[Parts], PackedTensor]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """As `Checkpoint.open`, and quantised checkpoints as blocks. Raises `WeightsError`."""
    checkpoint = Checkpoint.open(folder)
    fields = checkpoint.config.get("quantization_config")
    if not fields:
        return checkpoint
    return GroupedCheckpoint(checkpoint, _scheme_of(fields))


class GroupedCheckpoint(Checkpoint):
    """A checkpoint whose quantised matrices appear as tensors in blocks, named `X.weight`."""

    def __init__(self, stored: Checkpoint, scheme: _Scheme) -> None:
        config = {name: v for name, v in stored.config.items() if name != "quantization_config"}
        super().__init__(stored.folder, stored.tensors, config)
        self.encoding = scheme.name
        self._scheme = scheme
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        self.tensors = self._as_blocks(stored.tensors)

    def read_packed(self, name: str) -> PackedTensor | None:
        """A quantised matrix in blocks; `None` for any other tensor. Raises `WeightsError`."""
        parts = self._parts.get(name)
        if parts is None:
            return super().read_packed(name)
        try:
            return self._scheme.pack({part: self._map(info) for part, info in parts.items()})
        except WeightsError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            info = parts[self._scheme.main]
            raise WeightsError(f"Tensor {info.name!r} in {info.file} is not usable.") from error

    def _as_blocks(self, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        scheme, tensors = self._scheme, dict(stored)
        for name, info in stored.items():
            prefix, _, part = name.rpartition(".")
            if part != scheme.main or (part == "weight" and info.dtype not in ("I8", "F8_E4M3")):
                continue
            found = {part: tensors.pop(name)}
            for other in scheme.others:
                if (beside := tensors.pop(f"{prefix}.{other}", None)) is not None:
                    found[other] = beside
            shape = scheme.shape(info.shape)
            if len(shape) != 2 or not FORMATS[scheme.format].holds(shape[1]):
                raise WeightsError(f"Tensor {name!r} in {info.file} is no matrix of whole groups.")
            self._parts[f"{prefix}.weight"] = found
            tensors[f"{prefix}.weight"] = TensorInfo(
                f"{prefix}.weight", shape, "U8", info.file, scheme.format
            )
        return tensors


def _scheme_of(fields: Any) -> _Scheme:
    """What `quantization_config` asks for. Raises `WeightsError` for what is not known."""
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if method in ("gptq", "awq") and fields.get("bits", fields.get("w_bit")) == 4:
        if method == "awq" and fields.get("version", "gemm") != "gemm":
            raise WeightsError("config.json: AWQ weights are read in the version gemm alone.")
        offset = int(fields.get("checkpoint_format", "gptq") != "gptq_v2")
        return _AWQ if method == "awq" else _gptq_scheme(offset, fields.get("sym") is True)
    if method == "fp8":
        return _FP8
    if method == "compressed-tensors" and fields.get("format") in _COMPRESSED:
        return _COMPRESSED[fields["format"]]
    raise WeightsError(
        f"config.json asks for the quantization_config {method!r:.40}, which is not supported in"
        " this form: 4 bits by gptq and awq, fp8, and compressed-tensors with the formats"
        f" {', '.join(_COMPRESSED)} are."
    )


def _nibbles(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The eight halves of bytes of 32-bit words, lowest first, along a new dimension."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[dim] = 8
    return (words.unsqueeze(dim) >> shifts.view(shape)).bitwise_and(15).to(torch.uint8)


def _four_bits(
    codes_OI: torch.Tensor, scales_OG: torch.Tensor, zeros_OG: torch.Tensor | None
) -> PackedTensor:
    """Scale * (code - zero) in blocks; a zero of 8 everywhere is Q4_0's own."""
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
    scales_OG = parts["scales"].t()
    codes_OI = _nibbles(parts["qweight"], 1).flatten(0, 1).t().contiguous()
    zeros_OG = _nibbles(parts["qzeros"], 2).flatten(1).t().float() + offset
    num_inputs, num_groups = codes_OI.shape[1], scales_OG.shape[1]
    if "g_idx" in parts:
        in_order = torch.arange(num_inputs, dtype=torch.int32) // (num_inputs // num_groups)
        if not torch.equal(parts["g_idx"].to(torch.int32), in_order):
            raise WeightsError(
                "The checkpoint has groups of inputs in the order of their activations (desc_act),"
                " which is not supported; take one without."
            )
    if is_symmetric and not (zeros_OG == 8).all():
        raise ValueError("its zeros are not those of symmetric groups")
    return _four_bits(codes_OI, scales_OG, None if is_symmetric else zeros_OG)


def _awq(parts: Parts) -> PackedTensor:
    order = torch.tensor(_AWQ_ORDER)
    codes_OI = _nibbles(parts["qweight"], 2)[..., order].flatten(1).t().contiguous()
    zeros_OG = _nibbles(parts["qzeros"], 2)[..., order].flatten(1).t().float()
    return _four_bits(codes_OI, parts["scales"].t(), zeros_OG)


def _pack_quantized(parts: Parts) -> PackedTensor:
    if "weight_zero_point" in parts or "weight_g_idx" in parts:
        raise WeightsError(
            "compressed-tensors' 4 bits are read with symmetric groups in order alone."
        )
    return _four_bits(_nibbles(parts["weight_packed"], 2).flatten(1), parts["weight_scale"], None)


def _whole_bytes(parts: Parts) -> PackedTensor:
    """Signed bytes with a scale for each output, or for all."""
    codes_OI, num_outputs = parts["weight"], len(parts["weight"])
    scales = parts["weight_scale"].reshape(-1, 1, 1).half()
    blocks = codes_OI.view(num_outputs, -1, _BLOCK).view(torch.uint8)
    scales = scales.expand(num_outputs, blocks.shape[1], 1).contiguous().view(torch.uint8)
    packed = torch.cat((scales, blocks), dim=2).view(num_outputs, -1)
    return PackedTensor(packed, FORMATS["q8_0"])


def _eight_bit_floats(parts: Parts) -> PackedTensor:
    """With a scale for all, for each output, or for squares of 128."""
    weight_OI = parts["weight"].float()
    scales = parts["weight_scale" if "weight_scale" in parts else "weight_scale_inv"].float()
    if scales.dim() == 2 and scales.shape[1] > 1:
        if scales.shape != tuple(-(-size // _SQUARE) for size in weight_OI.shape):
            raise ValueError("its scales are not those of squares of 128")
        for dim in (0, 1):
            scales = scales.repeat_interleave(_SQUARE, dim=dim)
        scales = scales[: weight_OI.shape[0], : weight_OI.shape[1]]
    else:
        scales = scales.reshape(-1, 1)
    return quantise(weight_OI * scales, FORMATS["q8_0"])


def _same(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def _gptq_scheme(offset: int, is_symmetric: bool) -> _Scheme:
    """Zeros are stored less `offset`."""
    return _Scheme(
        "gptq",
        "qweight",
        ("qzeros", "scales", "g_idx"),
        "q4_0" if is_symmetric else "q4_1",
        lambda shape: (shape[1], 8 * shape[0]),
        lambda parts: _gptq(parts, offset, is_symmetric),
    )


_AWQ = _Scheme(
    "awq", "qweight", ("qzeros", "scales"), "q4_1", lambda shape: (8 * shape[1], shape[0]), _awq
)
_FP8 = _Scheme(
    "float8_e4m3fn",
    "weight",
    ("weight_scale", "weight_scale_inv", "input_scale"),
    "q8_0",
    _same,
    _eight_bit_floats,
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
        ),
        "int-quantized": _Scheme(
            "int8", "weight", ("weight_scale", "input_scale"), "q8_0", _same, _whole_bytes
        ),
        "float-quantized": _FP8,
    }
)

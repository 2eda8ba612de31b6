"""A checkpoint whose experts are stacked in one tensor, as if each had its own.

Owns the layouts of stacked tensors. Our decoder reads experts one at a time, by the names that most
checkpoints have; files in blocks of GGUF are converted to them.

Shapes: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.packed_linear import StoredWeight
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.float8 import float8_blocks, spread_scales
from triptych.core.runtime.tensors.mxfp4 import mxfp4_blocks
from triptych.core.weights.layout import TensorInfo

_BLOCKS, _EXPONENTS, _BIAS = "_blocks", "_scales", "_bias"
_SCALES, _OF_INPUTS = "_scale_inv", "_activation_scale"
"""The tensors next to a stack in fp8: scales `[E, parts of outputs, parts of inputs]`, and those of
activations, which our products do not round."""
_FLOAT8, _MXFP4 = "q8_0", "mxfp4"
"""The blocks that become of a stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedNames:
    """The tensors that hold a projection of all experts, by the end of their names.

    They are `[E, outputs, inputs]`, or `[E, inputs, outputs]` if transposed. The outputs of gate
    and up lie one after the other, or alternate. Biases end in `_bias` besides; in MXFP4 there are
    `_blocks` and `_scales`, which are never transposed, and in fp8 `_scale_inv`.
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool = True
    alternates: bool = False


ALTERNATING = StackedNames(alternates=True)
"""Those of gpt-oss, the one family with MXFP4 of its own."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of one expert: some outputs in a stacked tensor."""

    info: TensorInfo
    stack: TensorInfo
    expert: int
    outputs: slice
    is_transposed: bool

    def of(self, stacked: torch.Tensor) -> torch.Tensor:
        """Select its values in the stacked tensor."""
        return self.select(stacked[self.expert])

    def select(self, own: torch.Tensor) -> torch.Tensor:
        """Select its values in what the stack has of its expert."""
        return (own.t() if self.is_transposed else own)[self.outputs]


class ExpertCheckpoint(Checkpoint):
    """`stored` with stacked tensors as those of each expert; open as long as `stored` is."""

    def __init__(self, stored: Checkpoint, names: StackedNames) -> None:
        super().__init__(stored.folder, stored.tensors, stored.config)
        self.encoding, self.native, self._stored = stored.encoding, stored.native, stored
        self._parts: dict[str, _Part] = {}
        tensors = dict(stored.tensors)
        for info in stored.tensors.values():
            parts = list(_parts_of(info, names, f"{info.name}{_SCALES}" in stored.tensors))
            self._parts |= {part.info.name: part for part in parts}
            ends = (_SCALES, _OF_INPUTS)
            others = (_exponents(info), *(f"{info.name}{end}" for end in ends))
            for name in (info.name, *others) if parts else ():
                tensors.pop(name, None)
        self.tensors = tensors | {name: part.info for name, part in self._parts.items()}

    def read_packed(self, name: str) -> PackedTensor | None:
        """Read a matrix in blocks; `None` for any other tensor."""
        part = self._parts.get(name)
        if part is None:
            return self._stored.read_packed(name)
        if not part.info.format:
            return None
        if part.info.format == _FLOAT8:
            return self._float8(part)
        pairs, exponents_OG = (
            part.of(self._stored.read(stack)) for stack in (part.stack.name, _exponents(part.stack))
        )
        if exponents_OG.shape != pairs.shape[:-1] or exponents_OG.dtype != torch.uint8:
            raise WeightsError(f"Tensor {_exponents(part.stack)!r} does not fit its blocks.")
        return mxfp4_blocks(pairs, exponents_OG)

    def _float8(self, part: _Part) -> PackedTensor:
        stacked, name = self._stored.read(part.stack.name), f"{part.stack.name}{_SCALES}"
        try:
            scales = self._stored.read(name)[part.expert]
            scales = part.select(spread_scales(stacked.shape[1:], scales))
            return float8_blocks(part.of(stacked), scales)
        except (IndexError, ValueError, RuntimeError) as error:
            raise WeightsError(f"Tensor {name!r} does not fit its matrices.") from error

    def read_stored(self, name: str) -> StoredWeight | None:
        """Read a quantized matrix as stored; `None` for any other tensor."""
        return None if name in self._parts else self._stored.read_stored(name)

    def _map(self, info: TensorInfo) -> torch.Tensor:
        part = self._parts.get(info.name)
        return self._stored._map(info) if part is None else part.of(self._stored._map(part.stack))


def split_experts(checkpoint: Checkpoint, names: StackedNames | None) -> Checkpoint:
    """The checkpoint with a tensor for each expert, if its family has stacked ones."""
    return checkpoint if names is None else ExpertCheckpoint(checkpoint, names)


def _exponents(blocks: TensorInfo) -> str:
    """The tensor of the exponents of blocks."""
    return blocks.name.removesuffix(_BLOCKS) + _EXPONENTS


def _parts_of(info: TensorInfo, names: StackedNames, has_scales: bool) -> Iterator[_Part]:
    """The tensors of experts in a tensor; none if it is not stacked."""
    form = _FLOAT8 if has_scales and info.dtype == "F8_E4M3" else ""
    for base in (names.gate_up, names.down):
        for end, num_dims in (("", 3), (_BIAS, 2), (_BLOCKS, 4)):
            if info.name.endswith(f".{base}{end}") and len(info.shape) == num_dims:
                prefix = info.name.removesuffix(base + end)
                form = _MXFP4 if end == _BLOCKS else form
                yield from _parts_by_name(info, prefix, names, base, end, form)


def _parts_by_name(
    info: TensorInfo, prefix: str, names: StackedNames, base: str, end: str, form: str
) -> Iterator[_Part]:
    is_transposed = names.is_transposed and not end
    num_experts, num_outputs, *inputs = info.shape
    if is_transposed:
        num_outputs, inputs = inputs[0], [num_outputs]
    if end == _BLOCKS:
        inputs = [2 * math.prod(inputs)]
    if form == _FLOAT8 and not FORMATS[form].holds(*inputs):
        raise WeightsError(f"Tensor {info.name!r} in {info.file} is not of whole groups of inputs.")
    rows = {"down_proj": slice(None)}
    if base == names.gate_up:
        rows = _alternating() if names.alternates else _halves(num_outputs)
    for expert, (name, outputs) in product(range(num_experts), rows.items()):
        shape = len(range(num_outputs)[outputs]), *inputs
        last = "bias" if end == _BIAS else "weight"
        own = TensorInfo(
            f"{prefix}experts.{expert}.{name}.{last}",
            shape,
            "U8" if form else info.dtype,
            info.file,
            form,
        )
        yield _Part(own, info, expert, outputs, is_transposed)


def _alternating() -> dict[str, slice]:
    return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}


def _halves(num_outputs: int) -> dict[str, slice]:
    half = num_outputs // 2
    return {"gate_proj": slice(0, half), "up_proj": slice(half, None)}

"""The destinations of tensors in projections and norms.

Owns which rows and columns of a tensor a rank reads, and the form in which they are held. Knows no
family's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from triptych.core.block_formats import BlockFormat
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.runtime.kernels.packed_linear import HeldWeight
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.norm import Norm
from triptych.core.runtime.layers.shards import Shard
from triptych.core.runtime.tensors.checkpoint import Checkpoint, TensorSource
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.weights.encoding import WeightEncoding

AS_STORED = WeightEncoding()


@dataclass(frozen=True, slots=True)
class ProjectionTarget:
    """Rows of a projection, from `first` on; in blocks of integers as `encoding` says.

    `rows` and `inputs` are the rows and columns of the tensor that this rank has, if not all. Only
    that part of the file is read.
    """

    name: str
    linear: Linear
    first: int
    rows: Shard
    encoding: WeightEncoding
    inputs: Shard | None = None
    is_vocabulary: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return self.rows.total, self._inputs.total

    @property
    def into(self) -> torch.Tensor:
        """The destination rows as plain numbers."""
        return self.linear.weight_OI[self.first : self.first + self.rows.length]

    @property
    def _inputs(self) -> Shard:
        return self.inputs or Shard.whole(self.linear.num_inputs)

    @property
    def format(self) -> BlockFormat | None:
        """The blocks that the rows are held in, on all ranks; `None`: plain numbers."""
        num_inputs = self._inputs.total
        return self.encoding.format_of(self.name, num_inputs, is_vocabulary=self.is_vocabulary)

    def check_blocks(self) -> None:
        """Raise `ConfigError` where a block would be split between two ranks."""
        form, inputs = self.format, self._inputs
        if form is not None and not (form.holds(inputs.first) and form.holds(inputs.length)):
            raise ConfigError(
                f"--tensor-parallel-size: {self.name} is held in blocks of {form.num_inputs} inputs"
                f" ({form.name}), some of which would be on two ranks; give another number, or"
                " --quantization-encoding bfloat16."
            )

    def fill(self, source: TensorSource) -> None:
        """Put the tensor into the projection, unless that has adopted packed weights."""
        if self.linear.native is not None:
            return
        form, part = self.format, (self.rows.slice, self._inputs.slice)
        if form is None:
            stored_OI = source.read(self.name)[part]
            if not self.linear.map(stored_OI):
                self.into.copy_(stored_OI)
            return
        self.check_blocks()
        held = self._read_held(source)
        if held is None:
            held = quantize_blocks(source.read(self.name)[part], form)
        elif self.shape != (self.rows.length, self.linear.num_inputs):
            held = self._part_of(held)
        self.linear.hold(self.first, held)

    def _part_of(self, held: HeldWeight) -> HeldWeight:
        try:
            return held.part(self.rows.slice, self._inputs.slice)
        except WeightsError as error:
            raise WeightsError(f"{self.name}: {error.message}") from error

    def _read_held(self, source: TensorSource) -> HeldWeight | None:
        """The rows in quantized form, if any; those of a vocabulary are read only as blocks."""
        if not isinstance(source, Checkpoint):
            return None
        is_stored = self.linear.takes_stored and not self.is_vocabulary
        stored = source.read_stored(self.name) if is_stored else None
        return stored or source.read_packed(self.name)

    def num_bytes(self, item_bytes: int) -> int:
        """The most bytes in memory, with `item_bytes` for each plain number."""
        form, num_inputs = self.format, self.linear.num_inputs
        return self.rows.length * (form.row_bytes(num_inputs) if form else num_inputs * item_bytes)


@dataclass(frozen=True, slots=True)
class PartTarget:
    """The part `shard` of a tensor, such as a bias, along its first axis."""

    name: str
    into: torch.Tensor
    shard: Shard

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return (self.shard.total, *self.into.shape[1:])

    def fill(self, source: TensorSource) -> None:
        """Copy the part into place."""
        self.into.copy_(source.read(self.name)[self.shard.slice])

    def num_bytes(self, item_bytes: int) -> int:
        """Bytes in memory, with `item_bytes` for each number."""
        return self.into.numel() * item_bytes


def norm_targets(name: str, norm: Norm) -> Iterator[Target]:
    """The destinations of a norm's weight and bias, if it has them."""
    for last, tensor in norm.parameters.items():
        yield TensorTarget(f"{name}.{last}", tensor)


def fused_targets(
    prefix: str,
    linear: Linear,
    rows: Sequence[tuple[str, Shard]],
    encoding: WeightEncoding,
    inputs: Shard | None = None,
) -> Iterator[Target]:
    """The destinations of projections whose rows lie one after the other in `linear`."""
    first = 0
    for name, shard in rows:
        weight = f"{prefix}.{name}.weight"
        yield ProjectionTarget(weight, linear, first, shard, encoding, inputs)
        if linear.bias_O is not None:
            bias = linear.bias_O[first : first + shard.length]
            yield PartTarget(f"{prefix}.{name}.bias", bias, shard)
        first += shard.length

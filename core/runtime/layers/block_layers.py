"""Layers of other libraries' models whose weights stay in blocks of integers, or in float8.

Owns the replacements of `torch.nn.Linear` and `torch.nn.Embedding`, and the choice of the layers
that are replaced. Knows no model and no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych.core.block_formats import BlockFormat
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.packed_linear import HeldWeight
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.native_linear import (
    HeldLinear,
    SharedWeight,
    nothing,
    plain_layers,
)
from triptych.core.weights.encoding import WeightEncoding

_MIN_WORDS = 8192
"""Tables with fewer rows, such as positions and token types, stay plain."""
_REPEATED = re.compile(r"(^|\.)\d+\.")
"""Part of the name of layers in a model's repeated blocks, which come in lists."""


class BlockLinear(HeldLinear):
    """A projection whose weight is in blocks, or in float8, on a device."""

    def __init__(self, linear: nn.Linear, blocks: HeldWeight, where: BlockDevice) -> None:
        held = Linear(
            linear.in_features,
            linear.out_features,
            has_bias=False,
            dtype=where.dtype,
            device=where.device,
        )
        held.hold(0, blocks)
        held.prepare(where.native)
        super().__init__(linear, held)

    @property
    def num_bytes(self) -> int:
        """The bytes of the weight."""
        return self._held.num_bytes


class BlockEmbedding(nn.Embedding):
    """An embedding table in blocks; looked up rows are dequantized."""

    def __init__(self, table: nn.Embedding, blocks: PackedTensor, where: BlockDevice) -> None:
        nn.Module.__init__(self)  # not `Embedding`'s, which would allocate
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx, self.max_norm = table.padding_idx, table.max_norm
        self.norm_type, self.scale_grad_by_freq = table.norm_type, table.scale_grad_by_freq
        self.sparse = table.sparse
        self._blocks, self._dtype = blocks.to(where.device), where.dtype
        self.weight = nothing(blocks.shape, where.dtype, where.device)

    @property
    def num_bytes(self) -> int:
        """The bytes of the weight."""
        return self._blocks.num_bytes

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - `Embedding`'s own name for it
        """Look up the rows of these ids."""
        rows = self._blocks.rows(input.flatten()).dequantize(self._dtype)
        return rows.view(*input.shape, self.embedding_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """The device for blocks, and the compute type."""

    device: torch.device
    dtype: torch.dtype
    native: NativeKernels | None = None


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """A weight of a module that will be held in blocks: its `name` in the module's state."""

    name: str
    format: BlockFormat
    _weight: SharedWeight

    @property
    def layer(self) -> nn.Linear | nn.Embedding:
        """One of the layers that share the weight."""
        layer = self._weight.layers[0]
        assert isinstance(layer, nn.Linear | nn.Embedding)
        return layer

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and inputs."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return layer.out_features, layer.in_features
        return layer.num_embeddings, layer.embedding_dim

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        num_rows, num_inputs = self.shape
        return num_rows * self.format.row_bytes(num_inputs)

    def drop(self) -> None:
        """Remove the plain weight, so that it is not allocated, moved or kept."""
        for layer in self._weight.layers:
            layer._parameters["weight"] = None

    def put(self, blocks: HeldWeight, where: BlockDevice) -> None:
        """Replace the layers by ones over `blocks`."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            self._weight.replace(BlockLinear(layer, blocks, where))
        else:
            assert isinstance(blocks, PackedTensor)
            self._weight.replace(BlockEmbedding(layer, blocks, where))


def block_places(module: nn.Module, encoding: WeightEncoding) -> list[BlockPlace]:
    """The weights of a plain module that `encoding` holds in blocks.

    These are the weights of a model's repeated layers and of word tables: the first and last layers
    of a model are small, and its results depend on them most.
    """
    found = []
    for weight in (*_linears(module), *plain_layers(module, nn.Embedding)):
        layer = weight.layers[0]
        is_table = isinstance(layer, nn.Embedding)
        num_rows, num_inputs = _shape(layer)
        is_made = num_rows >= _MIN_WORDS if is_table else bool(_REPEATED.search(weight.names[0]))
        for name in (f"{name}.weight" for name in weight.names):
            if not is_made and name not in encoding.stored:
                continue
            form = encoding.format_of(name, num_inputs, is_vocabulary=is_table)
            if form is not None:
                found.append(BlockPlace(name, form, weight))
                break
    return found


def hold_blocks(
    module: nn.Module,
    places: list[BlockPlace],
    read: Callable[[BlockPlace, Tensor], HeldWeight],
    where: BlockDevice,
) -> None:
    """Replace the layers of a module that is loaded, and bring it to the device.

    `read` returns a place's blocks, from its plain weight or from the checkpoint. The plain weights
    never reach the device.
    """
    held = []
    for place in places:
        weight = place.layer.weight.detach()
        held.append((place, read(place, weight), weight.dtype))
        place.drop()
    module.to(where.device)
    for place, blocks, dtype in held:
        place.put(blocks, BlockDevice(device=where.device, dtype=dtype, native=where.native))


def block_bytes(module: nn.Module) -> int:
    """The bytes of a module's weights that are in blocks."""
    layers = (each for each in module.modules() if isinstance(each, BlockLinear | BlockEmbedding))
    return sum(layer.num_bytes for layer in layers)


def _linears(module: nn.Module) -> Iterator[SharedWeight]:
    """Layers that do not share their weight: tied projections may have different biases."""
    return (each for each in plain_layers(module, nn.Linear) if len(set(each.layers)) == 1)


def _shape(layer: nn.Module) -> tuple[int, int]:
    weight = layer._parameters["weight"]
    assert weight is not None
    num_rows, num_inputs = weight.shape
    return num_rows, num_inputs

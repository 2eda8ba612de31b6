"""Layers whose weights stay in host memory, and are copied to the device ahead of their use.

Owns the two buffers of the device that such layers use by turns, and the order of copies and
computation. While one layer computes, the weights of the next are copied, on a stream of their own;
those of the first two are copied from the end of one step on, for the next. Knows nothing of the
choice of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from triptych.core.runtime.layers.decoder_layer import DecoderLayer

NUM_BUFFERS = 2
_ALIGNMENT = 256
_PIECE_BYTES = 2**26
"""Of pinned memory, of which torch allocates powers of two: a layer of its own may take twice."""


@dataclass(frozen=True, slots=True)
class _HostLayer:
    """A layer's `num_bytes` on the host, in pieces, and the tensors that they are, in order."""

    layer: DecoderLayer
    likes: tuple[torch.Tensor, ...]
    num_bytes: int
    pieces: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, layer: DecoderLayer, device: torch.device) -> _HostLayer:
        """Copy the weights of a prepared layer, which has none until `read_from`."""
        tensors: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        layer.move_weights(collect)
        likes = tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
        size = sum(_aligned(like.nbytes) for like in likes)
        bytes_B = torch.empty(size, dtype=torch.uint8)
        for view, tensor in zip(_views(likes, bytes_B), tensors, strict=True):
            view.copy_(tensor)
        pieces = bytes_B.split(_PIECE_BYTES)
        if device.type == "cuda":
            pieces = tuple(piece.pin_memory() for piece in pieces)
        made = cls(layer, likes, size, pieces)
        made.read_from(torch.empty(size, dtype=torch.uint8, device="meta"))
        return made

    def copy_to(self, buffer_B: torch.Tensor) -> None:
        """Copy the weights to the beginning of a buffer, on the current stream."""
        places = buffer_B[: self.num_bytes].split(_PIECE_BYTES)
        for place, piece in zip(places, self.pieces, strict=True):
            place.copy_(piece, non_blocking=True)

    def read_from(self, bytes_B: torch.Tensor) -> None:
        """Let the layer read its weights from these bytes."""
        views = _views(self.likes, bytes_B)
        self.layer.move_weights(lambda tensor: next(views))


class HostLayers:
    """The layers of a stack from `first` on. `take` each when it is loaded, then `finish`."""

    def __init__(self, first: int, device: torch.device) -> None:
        self.first, self._device = first, device
        self._layers: list[_HostLayer] = []
        self._buffers: list[_Buffer] = []
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, layer: DecoderLayer) -> None:
        """Prepare a loaded layer, the next one, and move its weights to the host."""
        layer.prepare()
        self._layers.append(_HostLayer.of(layer, self._device))

    def finish(self) -> None:
        """Allocate the buffers, once all layers are here."""
        assert len(self._layers) > NUM_BUFFERS
        size = max(each.num_bytes for each in self._layers)
        self._buffers = [_Buffer(size, self._device) for _ in range(NUM_BUFFERS)]
        if self._copying is not None:
            self._copying.wait_stream(torch.cuda.current_stream(self._device))
        for number, each in enumerate(self._layers):
            each.read_from(self._buffers[number % NUM_BUFFERS].bytes_B)
        for number in range(NUM_BUFFERS):
            self._fetch(number)

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        """Compute layer `index` of the stack inside; copies of other layers begin."""
        number = index - self.first
        if number < 0:
            yield
            return
        buffer = self._buffers[number % NUM_BUFFERS]
        self._fetch(number)
        buffer.wait_until_filled()
        try:
            yield
        finally:
            buffer.is_used()
        following = number + NUM_BUFFERS
        self._fetch(following if following < len(self._layers) else number % NUM_BUFFERS)

    def _fetch(self, number: int) -> None:
        """Copy a layer's weights to its buffer, unless they are there or on their way."""
        self._buffers[number % NUM_BUFFERS].fill(number, self._layers[number], self._copying)


class _Buffer:
    """Bytes on the device, the number of the layer in them, and the events of their use."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes_B = torch.empty(size, dtype=torch.uint8, device=device)
        self._number = -1
        is_gpu = device.type == "cuda"
        self._filled, self._used = (torch.cuda.Event() if is_gpu else None for _ in range(2))

    def fill(self, number: int, layer: _HostLayer, copying: torch.cuda.Stream | None) -> None:
        """Copy a layer in, after the last use of the one before."""
        if number == self._number:
            return
        self._number = number
        if copying is None:
            layer.copy_to(self.bytes_B)
            return
        assert self._used is not None
        assert self._filled is not None
        copying.wait_event(self._used)
        with torch.cuda.stream(copying):
            layer.copy_to(self.bytes_B)
            self._filled.record()

    def wait_until_filled(self) -> None:
        """Let the current stream wait for the copy."""
        if self._filled is not None:
            torch.cuda.current_stream(self.bytes_B.device).wait_event(self._filled)

    def is_used(self) -> None:
        """Mark the end of the work that reads the bytes."""
        if self._used is not None:
            self._used.record()


def _views(likes: Sequence[torch.Tensor], bytes_B: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors of these shapes one after the other in bytes."""
    offset = 0
    for like in likes:
        part = bytes_B[offset : offset + like.nbytes].view(like.dtype)
        yield part.as_strided(like.shape, like.stride(), part.storage_offset())
        offset += _aligned(like.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

"""Multimodal prompt content, such as images, and the placeholder ids of its positions.

Owns the wire types, and the ids at positions that content fills in place of tokens. Content is sent
as its model's processor prepares it, except the last step: sizes, crops and tiles are done, but
values are still bytes, a quarter of the size; the engine scales and normalizes them. The id of a
position is made from the content's digest and the index in it, so that prompts with different
images never share a cached prefix. Such ids are 2**62 and above, like frame ids
(`core.engine_api.frames`). Knows no model and no kind of content.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from triptych.core.engine_api.frames import FIRST_FRAME_ID

ArrayType = Literal["bool", "uint8", "int64", "float32"]
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int64": 8, "float32": 4}


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Numbers in C order, little-endian."""

    dtype: ArrayType
    shape: tuple[int, ...]
    data: bytes

    @property
    def is_whole(self) -> bool:
        """Whether the number of bytes matches the shape."""
        num_bytes = math.prod(self.shape) * _ITEM_BYTES[self.dtype]
        return min(self.shape, default=0) >= 0 and len(self.data) == num_bytes


class ContentSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The positions of a prompt that one image or other content fills.

    `digest` identifies its features (see `content_digest`). They fill, in order, the positions of
    `runs`: (first, length) each, ascending; between runs are the model's separators. `grid` is the
    rows and columns of the features, for models with two-dimensional positions.
    """

    digest: bytes
    runs: tuple[tuple[int, int], ...]
    grid: tuple[int, int] = (0, 0)

    @property
    def start(self) -> int:
        """The first position."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The position after the last."""
        first, length = self.runs[-1]
        return first + length

    @property
    def num_features(self) -> int:
        """The number of positions filled."""
        return sum(length for _, length in self.runs)

    def filled_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Ranges filled within `start .. stop - 1`: first, end, and index of the first feature."""
        num_before = 0
        for first, length in self.runs:
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                yield low, high, num_before + low - first
            num_before += length

    def mark(self, start: int, stop: int) -> bytes:
        """A cache key for the features at `start .. stop - 1`, counted from `start`; or empty."""
        return b"".join(
            self.digest + struct.pack("<3q", low - start, high - start, feature)
            for low, high, feature in self.filled_ranges(start, stop)
        )


class PromptContent(msgspec.Struct, frozen=True, kw_only=True, tag="content"):
    """Content in a prompt. `inputs` are the encoder's inputs, by name."""

    span: ContentSpan
    inputs: dict[str, Array]

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoder's inputs."""
        return input_bytes(self.inputs)


def input_bytes(inputs: Mapping[str, Array]) -> int:
    """Total bytes of an encoder's inputs."""
    return sum(len(array.data) for array in inputs.values())


def content_digest(
    inputs: Mapping[str, Array], *, settings: str, model: str, adapter: str
) -> bytes:
    """SHA-256 over everything that determines the features of an image or other content.

    `settings` are the processor's, `model` is the digest of the weights.
    """
    fields = [b"triptych content 1", settings.encode(), model.encode(), adapter.encode()]
    for name, array in sorted(inputs.items()):
        shape = struct.pack(f"<{len(array.shape)}q", *array.shape)
        fields += [name.encode(), array.dtype.encode(), shape, array.data]
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<q", len(field)))
        digest.update(field)
    return digest.digest()


def tenant_digest(digest: bytes, tenant: str) -> bytes:
    """The digest salted with `tenant`, so that no tenant finds another's content in a cache.

    Callers without a tenant share unsalted digests.
    """
    if not tenant:
        return digest
    return hashlib.sha256(b"triptych content of tenant 1" + digest + tenant.encode()).digest()


def content_ids(digest: bytes, num_features: int) -> tuple[int, ...]:
    """The ids of a content's positions: bit 62, and 62 bits each of SHAKE-256 of its digest."""
    stream = hashlib.shake_256(digest).digest(8 * num_features)
    values = struct.unpack(f"<{num_features}Q", stream)
    return tuple(FIRST_FRAME_ID | max(value >> 2, 1) for value in values)

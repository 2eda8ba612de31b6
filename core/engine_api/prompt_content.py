"""Content of a prompt that is not text, and where it is.

Owns the wire types, and the ids of the positions that content fills. Content crosses as its model's
processor left it, but for the last step: sizes, crops and tiles are done, values are still bytes
(scaled and normalized beside the encoder, a quarter of the size). A position that content fills has
an id made from the content's digest and its place in it, so that prompts with different content
differ wherever ids are compared. Such ids are 2**62 and above, as those of frames
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

ArrayType = Literal["uint8", "int64", "float32"]
_ITEM_BYTES = {"uint8": 1, "int64": 8, "float32": 4}


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Numbers in C order, little-endian."""

    dtype: ArrayType
    shape: tuple[int, ...]
    data: bytes

    @property
    def is_whole(self) -> bool:
        """Whether there are as many bytes as the shape says."""
        num_bytes = math.prod(self.shape) * _ITEM_BYTES[self.dtype]
        return min(self.shape, default=0) >= 0 and len(self.data) == num_bytes


class ContentSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which positions of a prompt some content fills, and with what.

    `digest` names its features (see `content_digest`). They go, in order, to the positions of
    `runs`: (first, length) each, ascending; between them are separators of the model's. `grid` are
    rows and columns of the features, where positions follow them.
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
        """Positions that are filled."""
        return sum(length for _, length in self.runs)

    def filling(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What it fills of the positions `start .. stop - 1`: from, to, and its feature there."""
        num_before = 0
        for first, length in self.runs:
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                yield low, high, num_before + low - first
            num_before += length

    def mark(self, start: int, stop: int) -> bytes:
        """Which of its features fill which of the positions `start .. stop - 1`; empty if none."""
        return b"".join(
            self.digest + struct.pack("<3q", low - start, high - start, feature)
            for low, high, feature in self.filling(start, stop)
        )


class PromptContent(msgspec.Struct, frozen=True, kw_only=True, tag="content"):
    """Content in a prompt. `inputs` are what its encoder is called with, by name."""

    span: ContentSpan
    inputs: dict[str, Array]

    @property
    def num_bytes(self) -> int:
        """Of what its encoder is called with."""
        return input_bytes(self.inputs)


def input_bytes(inputs: Mapping[str, Array]) -> int:
    """How large an encoder's inputs are."""
    return sum(len(array.data) for array in inputs.values())


def content_digest(
    inputs: Mapping[str, Array], *, settings: str, model: str, adapter: str
) -> bytes:
    """SHA-256 over all that features of content come from.

    `settings` are the processor's, `model` the digest of the weights.
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


def digest_of_tenant(digest: bytes, tenant: str) -> bytes:
    """The digest of content for `tenant`, which finds nothing of other tenants' in a cache.

    Callers without a tenant share theirs.
    """
    if not tenant:
        return digest
    return hashlib.sha256(b"triptych content of tenant 1" + digest + tenant.encode()).digest()


def content_ids(digest: bytes, num_features: int) -> tuple[int, ...]:
    """The ids of the positions of content: bit 62, and 62 bits each of SHAKE-256 of its digest."""
    stream = hashlib.shake_256(digest).digest(8 * num_features)
    values = struct.unpack(f"<{num_features}Q", stream)
    return tuple(FIRST_FRAME_ID | max(value >> 2, 1) for value in values)

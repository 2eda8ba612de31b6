"""The packed weights of a decoder in a file that processes share.

Owns what identifies them, and when they are read or written. `core.runtime.tensors.packed_files`
owns the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from triptych.core.process.once import once
from triptych.core.runtime.kernels.native.arguments import NativeWeights
from triptych.core.runtime.kernels.native.build import recipe
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.tensors.packed_files import Packed, PackedFiles

LEAST_VALUES = 16 * 2**20
"""Fewer weights are not worth a file."""
_RUNTIME = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class SharedPacking:
    """The packed weights of one model. `model` identifies the content of its files."""

    files: PackedFiles
    model: str

    @contextmanager
    def of(self, linears: Sequence[Linear], details: str) -> Iterator[None]:
        """Around the loading of projections: those that are in a file are adopted before.

        Without a file, all that are packed at the end are written to one and mapped, if they are of
        some size. `details` cover everything else that decides the packed bytes, such as types and
        ranks.
        """
        if sum(each.num_outputs * each.num_inputs for each in linears) < LEAST_VALUES:
            yield
            return
        key = self._key(details)
        if self._adopt(self.files.find(key), linears):
            yield
            return
        with self.files.locked(key):
            if self._adopt(self.files.find(key), linears):  # of another process, meanwhile
                yield
                return
            yield
            self._share(key, linears)

    def _key(self, details: str) -> str:
        level = self.files.kernels.level
        parts = self.model, details, level, recipe(level), _code()
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _adopt(self, found: Packed | None, linears: Sequence[Linear]) -> bool:
        """Adopt weights, if they fit."""
        if found is None or not all(_fits(n, each, linears) for n, each in found.items()):
            return False
        for number, weights in found.items():
            linears[number].adopt(self.files.kernels, weights)
        return True

    def _share(self, key: str, linears: Sequence[Linear]) -> None:
        packed = {n: each.native for n, each in enumerate(linears) if each.native is not None}
        shared = self.files.write(key, packed) if packed else None
        for number, weights in ({} if shared is None else shared).items():
            packed[number].move_to(weights.parts)


def _fits(number: int, weights: NativeWeights, linears: Sequence[Linear]) -> bool:
    if not 0 <= number < len(linears):
        return False
    own = linears[number]
    sizes = weights.num_outputs, weights.num_inputs
    return sizes == (own.num_outputs, own.num_inputs) and weights.dtype in (None, own.dtype)


@once
def _code() -> str:
    """A digest of the code that decides what is packed, and in which order."""
    digest = hashlib.sha256(version("triptych").encode())
    for file in sorted(_RUNTIME.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()

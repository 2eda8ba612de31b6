"""A checkpoint whose tensors have other names than our decoder's, or are several in place of one.

Owns the form of the rules, and the view of a checkpoint by them. Knows no family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.packed_linear import StoredWeight
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.layout import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """How names in files become ours.

    `renamed` are regular expressions and what stands in their place. The tensors that end with each
    name in a sequence of `joined` are one tensor that ends with its key, their rows one after the
    other, however many each has: those of a convolution, which is never in blocks.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """Our name of a tensor that is stored as `name`, of the first part where it is joined."""
        for pattern, ours in self.renamed.items():
            name = re.sub(pattern, ours, name)
        return name


class RenamedCheckpoint(Checkpoint):
    """`stored` by other names; open as long as `stored` is.

    Raises `WeightsError` for two tensors of one name, and for parts that cannot be joined.
    """

    def __init__(self, stored: Checkpoint, names: StoredNames) -> None:
        self._sources: dict[str, tuple[TensorInfo, ...]] = {}
        for name, info in stored.tensors.items():
            (other,) = self._sources.setdefault(names.of(name), (info,))
            if other is not info:
                raise WeightsError(
                    f"Tensors {other.name!r} and {name!r} are two names of one; remove one of them."
                )
        for whole, parts in names.joined.items():
            self._join(whole, parts)
        tensors = {name: _whole(name, sources) for name, sources in self._sources.items()}
        super().__init__(stored.folder, tensors, stored.config)
        self.encoding, self.native, self._stored = stored.encoding, stored.native, stored

    def _join(self, whole: str, parts: tuple[str, ...]) -> None:
        for name in [name for name in self._sources if name.endswith(parts[0])]:
            prefix = name.removesuffix(parts[0])
            places = [prefix + part for part in parts]
            if all(place in self._sources for place in places):
                self._sources[prefix + whole] = sum(map(self._sources.pop, places), ())

    def read_packed(self, name: str) -> PackedTensor | None:
        """Read a matrix in blocks; `None` for any other tensor."""
        return self._stored.read_packed(self._first(name))

    def read_stored(self, name: str) -> StoredWeight | None:
        """Read a quantized matrix as stored; `None` for any other tensor."""
        return self._stored.read_stored(self._first(name))

    def _first(self, name: str) -> str:
        return self._sources[self._info(name).name][0].name

    def _map(self, info: TensorInfo) -> torch.Tensor:
        parts = [self._stored._map(source) for source in self._sources[info.name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole(name: str, sources: tuple[TensorInfo, ...]) -> TensorInfo:
    first, *others = sources
    if not others:
        return replace(first, name=name)
    if len({(info.dtype, info.format, info.shape[1:]) for info in sources}) > 1 or not all(
        info.shape and not info.format for info in sources
    ):
        parts = ", ".join(repr(info.name) for info in sources)
        raise WeightsError(f"Tensors {parts} differ in type or shape, or are no parts of one.")
    num_rows = sum(source.shape[0] for source in sources)
    return replace(first, name=name, shape=(num_rows, *first.shape[1:]))


def renamed(checkpoint: Checkpoint, names: StoredNames | None) -> Checkpoint:
    """The checkpoint by our names, if its family has others."""
    return checkpoint if names is None else RenamedCheckpoint(checkpoint, names)

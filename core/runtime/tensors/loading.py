"""Streams a checkpoint into a model, and checks that no tensor is missing or left over.

Owns the match between a checkpoint's tensors and a model's parameters. Knows no architecture: the
model says where each tensor goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import TensorSource

MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """The destination of tensor `name`: a view of a parameter, such as one slice of a weight."""

    name: str
    into: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return tuple(self.into.shape)

    def fill(self, source: TensorSource) -> None:
        """Copy the tensor into place, casting to the parameter's type and device."""
        self.into.copy_(source.read(self.name))

    def num_bytes(self, item_bytes: int) -> int:
        """Bytes in memory, with `item_bytes` for each number that is no integer."""
        is_plain = self.into.is_floating_point()
        return self.into.numel() * (item_bytes if is_plain else self.into.itemsize)


class Target(Protocol):
    """The destination of one tensor."""

    @property
    def name(self) -> str:
        """The name of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""

    def fill(self, source: TensorSource) -> None:
        """Read the tensor from `source` into place."""

    def num_bytes(self, item_bytes: int) -> int:
        """Bytes in memory, with `item_bytes` for each plain number."""


def load_tensors(
    checkpoint: TensorSource,
    targets: Iterable[Target],
    *,
    ignored: Collection[str] | Callable[[str], bool] = (),
    report: Callable[[float], None] | None = None,
) -> None:
    """Bring every target's tensor into place, one at a time.

    `ignored` are tensors that the model does not use, as names or as a predicate. `report` gets the
    share of bytes done, 0 to 1. Nothing is copied unless everything fits: a missing, extra or
    mis-shaped tensor raises `WeightsError` naming it and its file.
    """
    ordered = tuple(targets)
    _check_complete(checkpoint, ordered, ignored)
    _check_shapes(checkpoint, ordered)
    total = sum(checkpoint.tensors[target.name].num_bytes for target in ordered)
    done = 0
    with torch.no_grad():
        for target in ordered:
            target.fill(checkpoint)
            done += checkpoint.tensors[target.name].num_bytes
            if report is not None:
                report(done / max(total, 1))


def _check_complete(
    checkpoint: TensorSource,
    targets: tuple[Target, ...],
    ignored: Collection[str] | Callable[[str], bool],
) -> None:
    wanted = {target.name for target in targets}
    missing = [
        name for name in dict.fromkeys(t.name for t in targets) if name not in checkpoint.tensors
    ]
    if missing:
        files = _and_more(sorted({info.file for info in checkpoint.tensors.values()}))
        raise WeightsError(f"The model needs {_tensors(missing)}, not found in {files}.")
    is_ignored = ignored if callable(ignored) else frozenset(ignored).__contains__
    extra = [name for name in checkpoint.tensors if name not in wanted and not is_ignored(name)]
    if extra:
        files = _and_more(sorted({checkpoint.tensors[name].file for name in extra}))
        raise WeightsError(f"{files} holds {_tensors(extra)}, which this model does not have.")


def _check_shapes(checkpoint: TensorSource, targets: tuple[Target, ...]) -> None:
    for target in targets:
        info = checkpoint.tensors[target.name]
        if info.shape != target.shape:
            raise WeightsError(
                f"Tensor {info.name!r} in {info.file} has shape {list(info.shape)},"
                f" but the model needs {list(target.shape)}."
            )


def _tensors(names: list[str]) -> str:
    return ("tensor " if len(names) == 1 else "tensors ") + _and_more([repr(n) for n in names])


def _and_more(words: list[str]) -> str:
    """The first few words, and the number of further ones."""
    shown = ", ".join(words[:MAX_NAMED])
    return shown if len(words) <= MAX_NAMED else f"{shown} and {len(words) - MAX_NAMED} more"

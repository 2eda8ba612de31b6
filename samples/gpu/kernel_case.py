"""One measurement of a kernel, and the least time that it could take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from place import Place


@dataclass(frozen=True, slots=True)
class Case:
    """A call of ours, calls of other libraries that do the same, and the work that is inherent."""

    name: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    num_bytes: float = 0
    flops: float = 0
    is_float8: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The device's rates."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, case: Case) -> float:
        """The least seconds; 0 where the case does not say what it needs."""
        flops_per_s = self.flops_per_s * (2 if case.is_float8 else 1)
        return max(case.num_bytes / self.bytes_per_s, case.flops / flops_per_s)


def value_type(place: Place) -> torch.dtype:
    """The type of activations: the interpreter cannot multiply matrices of bfloat16."""
    return torch.bfloat16 if place.is_gpu else torch.float32


def randn(place: Place, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Random values on the device."""
    values = torch.empty(shape, dtype=value_type(place), device=place.device).normal_()
    return values if dtype is None else values.to(dtype)


def setting(
    module: ModuleType, name: str, value: Any, work: Callable[[], Any]
) -> Callable[[], Any]:
    """A call with another value of a module's constant."""

    @contextmanager
    def changed() -> Iterator[None]:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, before)

    def call() -> Any:
        with changed():
            return work()

    return call

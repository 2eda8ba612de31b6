"""Where the network's work can be cut.

Owns the convention: a computation with joints is a generator that, before each of its pieces,
yields how large that piece is, and returns what it computed. Whoever drives it may stop at a
joint and go on later: the result is the same, being the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")
Joints = Generator[float, None, Result]
"""Yields the size of the next piece in billions of multiplications."""


def gmacs(module: nn.Module, x_BCT: Tensor) -> float:
    """Billions of multiplications when `module` is applied to the positions of [B, C, T].

    Every weight is used once a position; those of styles, used once a row, weigh next to nothing.
    """
    num_weights = sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)
    return num_weights * len(x_BCT) * x_BCT.shape[-1] / 1e9


def finish(joints: Joints[Result]) -> Result:
    """Drive a computation to its end without stopping."""
    while True:
        try:
            next(joints)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

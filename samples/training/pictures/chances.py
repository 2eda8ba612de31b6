"""The random choices of an image, and a code of standard normals that tells them.

Owns which of the choices each value of a code tells. The image model is trained on noise that
carries the code of its image (`noise.py`), so that a seed chooses an image's set, places,
poses and ground at once, by something a small model can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SECTIONS: Mapping[str, int] = MappingProxyType(
    {"places": 13, "poses": 5, "colours": 3, "grounds": 11}
)
CODE_SIZE = sum(_SECTIONS.values())


@dataclass(frozen=True, slots=True)
class Chances:
    """Generators of the set and places, of poses, of colours, and of grounds."""

    places: np.random.Generator
    poses: np.random.Generator
    colours: np.random.Generator
    grounds: np.random.Generator

    @staticmethod
    def free(rng: np.random.Generator) -> Chances:
        """All choices by one generator."""
        return Chances(rng, rng, rng, rng)

    @staticmethod
    def told(code: NDArray[np.float64], rng: np.random.Generator) -> Chances:
        """The first choices of each kind as a code `[CODE_SIZE]` tells, all others by `rng`."""
        bounds = np.cumsum(list(_SECTIONS.values()))[:-1]
        return Chances(*(_Told(part, rng) for part in np.split(code, bounds)))


class _Told(np.random.Generator):
    """A generator whose first values are the ranks of given standard normals.

    Has the methods by which images are chosen; others would not ask the code, and are refused.
    """

    def __init__(self, code: NDArray[np.float64], rng: np.random.Generator) -> None:
        super().__init__(rng.bit_generator)
        self._left = [0.5 * (1 + erf(value / 2**0.5)) for value in code.tolist()]

    def _next(self) -> float:
        """A value in 0..1, evenly distributed."""
        return self._left.pop(0) if self._left else super().random()

    def _some(self, size: Any) -> Any:
        """One value, or an array of several."""
        if size is None:
            return self._next()
        return np.array([self._next() for _ in range(int(np.prod(size)))]).reshape(size)

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        return self._some(size)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (np.asarray(high) - low) * self._some(size)

    def integers(self, low: Any, high: Any = None, size: Any = None, **_: Any) -> Any:
        first, last = (0, low) if high is None else (low, high)
        return np.floor(first + (last - first) * np.asarray(self._some(size))).astype(int)

    def permutation(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("A code tells no order: choose one by its number.")

    def normal(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("A code's normals are told as ranks: use uniform().")

    shuffle, standard_normal = permutation, normal

    def gumbel(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return loc - scale * np.log(-np.log(self._some(size)))

    def choice(self, a: Any, size: Any = None, *_: Any, p: Any = None, **__: Any) -> Any:
        assert size is None
        shares = np.full(len(a), 1 / len(a)) if p is None else np.asarray(p)
        number = np.searchsorted(np.cumsum(shares), self._next(), side="right")
        return np.asarray(a)[min(int(number), len(a) - 1)]

"""Where a relation puts things, with all freedom that it leaves.

Owns spots alone. Knows nothing of what the things are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from pictures.arrangements import COUNTS
from pictures.compositions import PICTURE_SIZE, Spot

SIZES = np.array((48, 64)) / PICTURE_SIZE
"""Sizes that things have: few, so that a small model learns each."""
_ORDERS = tuple(permutations(range(3)))


@dataclass(frozen=True, slots=True)
class Placed:
    """A thing's number, its spot, and the share of it below which it is drawn again at the end."""

    index: int
    spot: Spot
    front: float = 1.0


def place(relation: str, said: str, rng: np.random.Generator) -> list[Placed]:
    """Spots of things in a relation, those behind first; `said` is where a lone one is."""
    if not relation:
        return [Placed(0, _lone_spot(said, rng))]
    if relation in COUNTS:
        spots = _scattered(COUNTS[relation], rng)
        return [Placed(0, spot) for spot in spots]
    if relation in ("between", "beside each other"):
        return _row(relation == "between", rng)
    return _pair(relation, rng)


def _stepped(size: float) -> float:
    """The nearest of the sizes."""
    return float(SIZES[np.abs(SIZES - size).argmin()])


def _lone_spot(said: str, rng: np.random.Generator) -> Spot:
    size = {"large": rng.uniform(0.86, 0.99), "small": rng.uniform(0.35, 0.42)}.get(
        said, rng.uniform(0.36, 0.5 if said else 0.56)
    )
    size = _stepped(size)
    free = (1 - size) / 2
    x, y = 0.5 + free * rng.uniform(-1, 1, 2)
    aside = rng.uniform(0.2, 0.29)
    x = {"left": aside, "right": 1 - aside}.get(said, x)
    y = {"top": aside, "bottom": 1 - aside}.get(said, y)
    return Spot(float(x), float(y), float(size))


def _scattered(count: int, rng: np.random.Generator) -> list[Spot]:
    """Spots of several of a kind, apart from each other; five overlap at their corners."""
    size = _stepped({2: 0.46, 3: 0.42, 4: 0.42, 5: 0.31}[count] * rng.uniform(0.82, 1.05))
    grids: Mapping[int, list[list[tuple[float, float]]]] = {
        2: [[(-1, 0), (1, 0)], [(0, -1), (0, 1)], [(-1, -0.8), (1, 0.8)], [(-1, 0.8), (1, -0.8)]],
        3: [[(-1, -0.9), (1, -0.9), (0, 0.9)], [(-1, 0.9), (1, 0.9), (0, -0.9)]],
        4: [[(-1, -1), (1, -1), (-1, 1), (1, 1)], [(0, -1.1), (-1.1, 0), (1.1, 0), (0, 1.1)]],
        5: [[(-1.25, -1), (1.25, -1), (0, 0), (-1.25, 1), (1.25, 1)]],
    }
    offsets = grids[count][int(rng.integers(len(grids[count])))]
    reach = 0.5 - size / 2 - 0.01
    step = {2: 0.25, 3: 0.25, 4: 0.24, 5: 0.26}[count]
    moved = [0.5 + np.array(offset) * step + rng.uniform(-0.035, 0.035, 2) for offset in offsets]
    inside = [centre.clip(0.5 - reach, 0.5 + reach) for centre in moved]
    return [Spot(float(x), float(y), size) for x, y in inside]


def _row(is_between: bool, rng: np.random.Generator) -> list[Placed]:
    """Three different things; with `is_between` the first is in the middle."""
    size = _stepped(rng.uniform(0.28, 0.34))
    slots = [0.18, 0.5, 0.82]
    order = [1, 0, 2] if is_between else [0, 1, 2]
    if is_between and rng.random() < 0.5:
        order = [1, 2, 0]
    elif not is_between:
        order = list(_ORDERS[int(rng.integers(len(_ORDERS)))])
    bent = 0.0 if is_between else rng.choice([0.0, 0.18, -0.18])
    level = rng.uniform(0.42, 0.58)
    spots = []
    for index, slot in enumerate(order):
        y = level + (bent if slot == 1 else -bent) + rng.uniform(-0.04, 0.04)
        x = slots[slot] + rng.uniform(-0.01, 0.01)
        spots.append(Placed(index, Spot(float(x), float(y), size)))
    return spots


def _pair(relation: str, rng: np.random.Generator) -> list[Placed]:
    """Two things. Offsets are from the one that stands to the one that is related to it."""
    if relation in ("next to", "left of"):
        first_size, second_size = map(_stepped, rng.uniform(0.42, 0.52, 2))
        gap = 0.25 if relation == "left of" or rng.random() < 0.5 else -0.25
        level = rng.uniform(0.42, 0.58, 2)
        ways = rng.uniform(-0.015, 0.015, 2)
        return [
            Placed(0, Spot(0.5 - gap + ways[0], level[0], first_size)),
            Placed(1, Spot(0.5 + gap + ways[1], level[1], second_size)),
        ]
    return _PAIRS[relation](rng)


def _stacked(rng: np.random.Generator, upper: int, gap: float) -> list[Placed]:
    """One above the other; a negative gap lets them overlap, the upper one in front."""
    sizes = [_stepped(size) for size in rng.uniform(0.41, 0.5, 2)]
    x = 0.5 + rng.uniform(-0.12, 0.12)
    total = sizes[0] + gap + sizes[1]
    top = 0.5 - total / 2 + rng.uniform(-0.02, 0.02)
    lean = rng.uniform(-0.06, 0.06)
    above = Placed(upper, Spot(x + lean, top + sizes[0] / 2, sizes[0]))
    below = Placed(1 - upper, Spot(x, top + sizes[0] + gap + sizes[1] / 2, sizes[1]))
    return [below, above]


def _inside(rng: np.random.Generator) -> list[Placed]:
    size = _stepped(rng.uniform(0.6, 0.74))
    x, y = 0.5 + rng.uniform(-0.12, 0.12), 0.6 + rng.uniform(-0.03, 0.04)
    inner = _stepped(size * rng.uniform(0.62, 0.75))
    above = y - size * rng.uniform(0.32, 0.42)
    lean = rng.uniform(-0.06, 0.06)
    return [
        Placed(1, Spot(x, y, size), front=rng.uniform(0.42, 0.52)),
        Placed(0, Spot(x + lean, max(above, inner / 2), inner)),
    ]


def _riding(rng: np.random.Generator) -> list[Placed]:
    size, rider = _stepped(rng.uniform(0.6, 0.72)), _stepped(rng.uniform(0.41, 0.5))
    x, y = 0.5 + rng.uniform(-0.12, 0.12), 0.97 - size / 2 - rng.uniform(0.0, 0.06)
    seat = y - size * rng.uniform(0.34, 0.46)
    lean = rng.uniform(-0.08, 0.08)
    return [
        Placed(1, Spot(x, y, size)),
        Placed(0, Spot(x + lean, max(seat, rider / 2), rider)),
    ]


def _holding(rng: np.random.Generator) -> list[Placed]:
    size, held = _stepped(rng.uniform(0.62, 0.76)), _stepped(rng.uniform(0.38, 0.48))
    hand = -1 if rng.random() < 0.5 else 1
    x, y = 0.5 - hand * rng.uniform(0.06, 0.12), 0.5 + rng.uniform(-0.06, 0.06)
    return [
        Placed(0, Spot(x, y, size)),
        Placed(1, Spot(x + hand * size * 0.42, y + size * rng.uniform(0.08, 0.24), held)),
    ]


def _before(rng: np.random.Generator, front: int) -> list[Placed]:
    size, near = _stepped(rng.uniform(0.6, 0.72)), _stepped(rng.uniform(0.41, 0.5))
    aside = (-1 if rng.random() < 0.5 else 1) * rng.uniform(0.08, 0.16)
    return [
        Placed(1 - front, Spot(0.5 - aside, 0.36 + rng.uniform(-0.02, 0.03), size)),
        Placed(front, Spot(0.5 + aside, 0.73 + rng.uniform(-0.02, 0.03), near)),
    ]


_PAIRS: Mapping[str, Callable[[np.random.Generator], list[Placed]]] = {
    "above": lambda rng: _stacked(rng, 0, 0.03),
    "below": lambda rng: _stacked(rng, 1, 0.03),
    "on": lambda rng: _stacked(rng, 0, -0.07),
    "under": lambda rng: _stacked(rng, 1, -0.02),
    "in": _inside,
    "riding": _riding,
    "holding": _holding,
    "in front of": lambda rng: _before(rng, 0),
    "behind": lambda rng: _before(rng, 1),
}

"""Grounds behind things: plain, graded, patterned, and simple scenes.

Owns what a caption may say of a ground, and painting one with all the rest chosen at random.

Shapes: S is the image's side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pictures.compositions import BACKGROUNDS

Pixels = NDArray[np.float32]
PATTERNS = ("gradient", "striped", "dotted", "checked")
_REPEATS = (4, 8)  # of a pattern, over the image: each token has a half or a whole one
_DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_WHITE_SHARE = 0.35
SCENES = ("meadow", "sea", "beach", "desert", "snow", "night", "sunset", "room")


@dataclass(frozen=True, slots=True)
class Ground:
    """What is said of a ground; each part may be left unsaid, and is then free."""

    colour: str = ""
    pattern: str = ""
    scene: str = ""


_UNSAID_KINDS: Mapping[str, float] = MappingProxyType(
    {"plain": 0.62, "pattern": 0.2, "scene": 0.18}
)


def sample_ground(rng: np.random.Generator) -> Ground:
    """What a caption says of the ground: half of the time nothing."""
    kind = rng.random()
    colour = str(rng.choice(list(BACKGROUNDS)))
    if kind < 0.5:
        return Ground()
    if kind < 0.75:
        return Ground(colour)
    if kind < 0.85:
        is_coloured = rng.random() < 0.6
        return Ground(colour if is_coloured else "", str(rng.choice(PATTERNS)))
    return Ground(scene=str(rng.choice(SCENES)))


def paint_ground(ground: Ground, side: int, rng: np.random.Generator) -> Pixels:
    """A ground, `[S, S, 3]` in 0..255, true to what is said of it."""
    kind = "scene" if ground.scene else "pattern" if ground.pattern else "plain"
    if ground == Ground():
        kind = str(rng.choice(list(_UNSAID_KINDS), p=list(_UNSAID_KINDS.values())))
    if kind == "scene":
        return _PAINTERS[ground.scene or str(rng.choice(SCENES))](side, rng).clip(0, 255)
    colour = _shade(ground.colour, rng)
    if kind == "pattern":
        return _patterned(ground.pattern or str(rng.choice(PATTERNS)), colour, side, rng)
    return np.broadcast_to(colour, (side, side, 3)).astype(np.float32)


def _shade(name: str, rng: np.random.Generator) -> Pixels:
    """A shade of a colour, or white or any other."""
    if not name:
        is_white, shade = rng.random() < _WHITE_SHARE, rng.uniform(20, 255, 3)
        return np.full(3, 255, np.float32) if is_white else shade.astype(np.float32)
    spread = 4 if name in ("white", "black") else 14
    shade = np.array(BACKGROUNDS[name]) + rng.uniform(-spread, spread, 3)
    return shade.clip(0, 255).astype(np.float32)


def _mixed(first: Pixels, second: Pixels, share: Pixels) -> Pixels:
    mixed: Pixels = first + (second - first) * share[..., None]
    return mixed.astype(np.float32)


def _places(side: int) -> tuple[Pixels, Pixels]:
    """Right and down of each pixel, 0 to 1."""
    line = (np.arange(side, dtype=np.float32) + 0.5) / side
    return np.meshgrid(line, line)


def _patterned(pattern: str, colour: Pixels, side: int, rng: np.random.Generator) -> Pixels:
    """A pattern of a colour and a lighter or darker shade of it."""
    is_light = colour.mean() > 140
    reach = rng.uniform(0.35, 0.6) if pattern == "gradient" else rng.uniform(0.2, 0.42)
    other = colour * (1 - reach) if is_light else colour + (255 - colour) * reach
    right, down = _DIRECTIONS[int(rng.integers(len(_DIRECTIONS)))]
    x, y = _places(side)
    along, across = (x - 0.5) * right + (y - 0.5) * down, (y - 0.5) * right - (x - 0.5) * down
    if pattern == "gradient":
        return _mixed(colour, other, (along / 1.2 + 0.5).clip(0, 1))
    count = int(rng.choice(_REPEATS))
    first, second = rng.integers(0, 4, 2) / 4
    waves = np.sin(2 * np.pi * (count * along + first))
    if pattern == "striped":
        share = waves
    else:
        crossing = np.sin(2 * np.pi * (count * across + second))
        share = waves * crossing if pattern == "checked" else waves + crossing - 1.0
    sharpness = side / (2 * np.pi * count)
    return _mixed(colour, other, (share * sharpness + 0.5).clip(0, 1))


def _horizon(
    above: tuple[Pixels, Pixels], below: tuple[Pixels, Pixels], line: Pixels, side: int
) -> Pixels:
    """Two graded areas above and below a line, given as heights 0 to 1 by column."""
    _, y = _places(side)
    upper = _mixed(*above, (y / line).clip(0, 1))
    lower = _mixed(*below, ((y - line) / (1 - line)).clip(0, 1))
    return _mixed(upper, lower, ((y - line) * side + 0.5).clip(0, 1))


def _near(rng: np.random.Generator, *colour: float, spread: float = 14) -> Pixels:
    return (np.array(colour) + rng.uniform(-spread, spread, 3)).clip(0, 255).astype(np.float32)


def _hilly(side: int, rng: np.random.Generator, height: float, roughness: float) -> Pixels:
    x = (np.arange(side, dtype=np.float32) + 0.5) / side
    line = np.full(side, height + rng.uniform(-0.06, 0.06))
    for frequency in (1, 2):
        wave = np.sin(2 * np.pi * (frequency * x + rng.random()))
        line = line + roughness * rng.random() / frequency * wave
    return np.broadcast_to(line.astype(np.float32), (side, side))


def _sky(rng: np.random.Generator) -> tuple[Pixels, Pixels]:
    return _near(rng, 110, 175, 240), _near(rng, 200, 230, 250, spread=5)


def _meadow(side: int, rng: np.random.Generator) -> Pixels:
    grass = _near(rng, 125, 195, 90), _near(rng, 70, 150, 60)
    return _horizon(_sky(rng), grass, _hilly(side, rng, 0.58, 0.07), side)


def _sea(side: int, rng: np.random.Generator) -> Pixels:
    water = _near(rng, 60, 140, 200), _near(rng, 25, 80, 150)
    return _horizon(_sky(rng), water, _hilly(side, rng, 0.5, 0.0), side)


def _beach(side: int, rng: np.random.Generator) -> Pixels:
    sand = _near(rng, 240, 220, 165), _near(rng, 225, 195, 135)
    _, y = _places(side)
    shore = _hilly(side, rng, 0.7, 0.04)
    return _mixed(_sea(side, rng), _mixed(*sand, y), ((y - shore) * side + 0.5).clip(0, 1))


def _desert(side: int, rng: np.random.Generator) -> Pixels:
    sand = _near(rng, 238, 195, 115), _near(rng, 215, 155, 80)
    sky = _near(rng, 150, 205, 240), _near(rng, 250, 235, 200)
    return _horizon(sky, sand, _hilly(side, rng, 0.6, 0.09), side)


def _snow(side: int, rng: np.random.Generator) -> Pixels:
    sky = _near(rng, 140, 170, 205), _near(rng, 200, 215, 232)
    ground = _near(rng, 246, 249, 252, spread=3), _near(rng, 222, 232, 245, spread=5)
    picture = _horizon(sky, ground, _hilly(side, rng, 0.62, 0.06), side)
    return _dotted_with(picture, np.full(3, 255, np.float32), int(rng.integers(12, 30)), 1.4, rng)


def _night(side: int, rng: np.random.Generator) -> Pixels:
    sky = _near(rng, 12, 16, 48, spread=8), _near(rng, 45, 50, 110)
    ground = _near(rng, 25, 35, 50, spread=8), _near(rng, 15, 20, 32, spread=6)
    picture = _horizon(sky, ground, _hilly(side, rng, 0.82, 0.06), side)
    return _dotted_with(picture, _near(rng, 250, 245, 215, spread=5), 26, 1.0, rng, lowest=0.7)


def _sunset(side: int, rng: np.random.Generator) -> Pixels:
    sky = _near(rng, 120, 70, 150), _near(rng, 252, 165, 90)
    ground = _near(rng, 95, 60, 85), _near(rng, 50, 32, 60)
    return _horizon(sky, ground, _hilly(side, rng, 0.68, 0.07), side)


def _room(side: int, rng: np.random.Generator) -> Pixels:
    wall = rng.uniform(165, 245, 3).astype(np.float32)
    floor = _near(rng, 175, 125, 85, spread=22)
    return _horizon((wall, wall * 0.95), (floor, floor * 0.8), _hilly(side, rng, 0.7, 0.0), side)


def _dotted_with(
    picture: Pixels,
    colour: Pixels,
    count: int,
    radius: float,
    rng: np.random.Generator,
    *,
    lowest: float = 1.0,
) -> Pixels:
    """Small dots, none below `lowest`."""
    side = len(picture)
    x, y = _places(side)
    share = np.zeros((side, side), np.float32)
    for right, down in rng.random((count, 2)):
        size = radius * rng.uniform(0.6, 1.3)
        left, top = int(right * side), int(down * lowest * side)
        area = np.s_[max(0, top - 4) : top + 5, max(0, left - 4) : left + 5]
        distance = np.hypot(x[area] - right, y[area] - down * lowest) * side
        share[area] = np.maximum(share[area], (size + 0.5 - distance).clip(0, 1))
    return _mixed(picture, colour, share)


_PAINTERS: Mapping[str, Callable[[int, np.random.Generator], Pixels]] = MappingProxyType(
    {
        "meadow": _meadow,
        "sea": _sea,
        "beach": _beach,
        "desert": _desert,
        "snow": _snow,
        "night": _night,
        "sunset": _sunset,
        "room": _room,
    }
)

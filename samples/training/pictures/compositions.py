"""The content of a plain image as data: objects, colours, background, style, layout.

Owns the catalogue of objects, the layouts, random sampling, and how combinations are held out.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from pictures.sprites import TINTS

PICTURE_SIZE = 128
BACKGROUNDS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "white": (255, 255, 255),
        "black": (24, 24, 28),
        "gray": (150, 150, 155),
        "red": (215, 60, 55),
        "orange": (245, 150, 50),
        "yellow": (250, 215, 75),
        "green": (90, 180, 95),
        "blue": (65, 125, 225),
        "light blue": (165, 212, 245),
        "purple": (150, 100, 210),
        "pink": (250, 170, 200),
        "brown": (140, 95, 65),
    }
)
_OBJECTS = Path(__file__).with_name("objects.toml")
_HELD_OUT_SHARE = 1 / 16
_FLAT_SHARE = 0.15
_CATEGORIES = ("animals", "plants", "food", "vehicles", "buildings", "nature", "things", "faces")


@dataclass(frozen=True, slots=True)
class Thing:
    """An object by name; `colour` if it is tinted."""

    name: str
    colour: str | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """The position of an object: its centre and longer side, as shares of the image's side."""

    x: float
    y: float
    size: float


LAYOUTS: Mapping[str, tuple[Spot, ...]] = MappingProxyType(
    {
        "single": (Spot(0.5, 0.5, 0.78),),
        "large": (Spot(0.5, 0.5, 0.94),),
        "small": (Spot(0.5, 0.5, 0.36),),
        "left": (Spot(0.25, 0.5, 0.45),),
        "right": (Spot(0.75, 0.5, 0.45),),
        "top": (Spot(0.5, 0.25, 0.45),),
        "bottom": (Spot(0.5, 0.75, 0.45),),
        "pair": (Spot(0.25, 0.5, 0.45), Spot(0.75, 0.5, 0.45)),
        "stack": (Spot(0.5, 0.25, 0.45), Spot(0.5, 0.75, 0.45)),
        "two": (Spot(0.25, 0.5, 0.45), Spot(0.75, 0.5, 0.45)),
        "three": (Spot(0.27, 0.28, 0.4), Spot(0.73, 0.28, 0.4), Spot(0.5, 0.73, 0.4)),
        "four": tuple(Spot(x, y, 0.4) for y in (0.27, 0.73) for x in (0.27, 0.73)),
    }
)
"""Positions of the objects. "pair" is left and right, "stack" above and below; "two" to "four"
repeat one object; all others show one.
"""
COUNTS: Mapping[str, int] = MappingProxyType({"two": 2, "three": 3, "four": 4})
_CHANCES: Mapping[str, float] = MappingProxyType(
    {
        "single": 0.56,
        "large": 0.02,
        "small": 0.04,
        **dict.fromkeys(("left", "right", "top", "bottom"), 0.02),
        "pair": 0.18,
        "stack": 0.06,
        **dict.fromkeys(("two", "three", "four"), 0.02),
    }
)


def in_held_out_share(*parts: str) -> bool:
    """Whether a combination is held out from training: a fixed sixteenth of all."""
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


@dataclass(frozen=True, slots=True)
class Composition:
    """One image. `things` has as many distinct objects as the layout shows."""

    layout: str
    things: tuple[Thing, ...]
    background: str = "white"
    style: str = "3d"

    @property
    def is_held_out(self) -> bool:
        """Whether it is held out from training: a fixed sixteenth of all combinations."""
        return in_held_out_share(
            self.layout, *sorted(map(repr, self.things)), self.background, self.style
        )

    @property
    def spots(self) -> tuple[tuple[Thing, Spot], ...]:
        """Each object with its position."""
        spots = LAYOUTS[self.layout]
        return tuple(zip(self.things * (len(spots) // len(self.things)), spots, strict=True))


@dataclass(frozen=True)
class Catalogue:
    """The objects, read from objects.toml."""

    sprites: Mapping[str, str]
    """Emoji by object."""
    categories: Mapping[str, str]
    other_names: Mapping[str, Sequence[str]]
    own_colours: Mapping[str, str]
    other_sprites: Mapping[str, Mapping[str, str]]
    tinted: frozenset[str]
    plurals: Mapping[str, str]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.sprites))

    def colours(self, name: str) -> tuple[str, ...]:
        """Colours that an object can be tinted in."""
        if name in self.tinted:
            return tuple(TINTS)
        return tuple(self.other_sprites.get(name, ()))

    def look(self, thing: Thing) -> tuple[str, str | None]:
        """The emoji of an object, and its tint if it has one."""
        other = self.other_sprites.get(thing.name, {}).get(thing.colour or "")
        if other is not None:
            return other, None
        return self.sprites[thing.name], thing.colour


def open_catalogue() -> Catalogue:
    """Read the objects."""
    read = tomllib.loads(_OBJECTS.read_text(encoding="utf-8"))
    entries = [(name, emoji, kind) for kind in _CATEGORIES for name, emoji in read[kind].items()]
    return Catalogue(
        sprites={name: emoji for name, emoji, _ in entries},
        categories={name: kind for name, _, kind in entries},
        other_names=read["other-names"],
        own_colours=read["own-colours"],
        other_sprites=read["other-sprites"],
        tinted=frozenset(read["tinted"]["names"]),
        plurals=read["plurals"],
    )


def sample(catalogue: Catalogue, rng: np.random.Generator) -> Composition:
    """A random composition, held out or not."""
    layout = str(rng.choice(list(_CHANCES), p=list(_CHANCES.values())))
    names = catalogue.names
    if layout in COUNTS:
        names = tuple(name for name in names if catalogue.plurals.get(name) != "")
    num_things = 2 if layout in ("pair", "stack") else 1
    chosen = rng.choice(len(names), num_things, replace=False)
    background = "white" if rng.random() < 0.25 else str(rng.choice(list(BACKGROUNDS)))
    return Composition(
        layout=layout,
        things=tuple(_coloured(names[index], catalogue, background, rng) for index in chosen),
        background=background,
        style="flat" if rng.random() < _FLAT_SHARE else "3d",
    )


def _coloured(name: str, catalogue: Catalogue, background: str, rng: np.random.Generator) -> Thing:
    colours = [colour for colour in catalogue.colours(name) if colour != background]
    if not colours or rng.random() < 0.25:
        return Thing(name)
    return Thing(name, str(rng.choice(colours)))

"""The labels of an image: slots, each with the classes it can take.

Owns the classes, and the slots of a scene. `sentence.py` maps them to soft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pictures.compositions import BACKGROUNDS, COUNTS, Catalogue, Thing
from scenes import Scene
from words import LONGEST

NOTHING = ""
"""The first class of every kind: absent from the image."""
UNKNOWN = -1
"""An unlabelled slot: the colour of an object with several colours."""
FIELDS = (
    ("count", "count"),
    ("size", "size"),
    ("colour", "colour"),
    ("name", "name"),
    ("place", "place"),
    ("colour", "other-colour"),
    ("name", "other-name"),
    ("place", "other-place"),
    ("ground", "ground"),
)
"""Kinds and slots, before the letters of the word."""
NUM_COLUMNS = len(FIELDS) + LONGEST
BLANK = 26
"""The padding after a word's last letter."""
_COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "gray")
_PLACES: Mapping[str, tuple[str, ...]] = {
    "single": ("middle",),
    "large": ("middle",),
    "small": ("middle",),
    "left": ("left",),
    "right": ("right",),
    "top": ("top",),
    "bottom": ("bottom",),
    "pair": ("left", "right"),
    "stack": ("top", "bottom"),
}


def kinds(catalogue: Catalogue) -> dict[str, tuple[str, ...]]:
    """The classes of each kind of slot."""
    return {
        "count": (NOTHING, "one", *COUNTS),
        "size": (NOTHING, "large", "small"),
        "colour": (NOTHING, *_COLOURS),
        "name": (NOTHING, *catalogue.names),
        "place": (NOTHING, "middle", "left", "right", "top", "bottom"),
        "ground": (NOTHING, *BACKGROUNDS),
    }


def known_colour(thing: Thing, catalogue: Catalogue) -> str | None:
    """The colour of an object, if it is unambiguous."""
    return thing.colour or catalogue.own_colours.get(thing.name)


def places(scene: Scene) -> tuple[str, ...]:
    """The positions of the objects; none for several of a kind."""
    found = _PLACES.get(scene.composition.layout, ())
    return found if scene.composition.things else ()


def slot_values(scene: Scene, catalogue: Catalogue) -> dict[str, str | None]:
    """The value of every slot; `None`: unlabelled."""
    one = scene.composition
    values: dict[str, str | None] = {slot: NOTHING for _, slot in FIELDS}
    values["ground"] = one.background
    if one.things:
        values["count"] = one.layout if one.layout in COUNTS else "one"
    if one.layout in ("large", "small"):
        values["size"] = one.layout
    for prefix, thing in zip(("", "other-"), one.things, strict=False):
        values[f"{prefix}name"] = thing.name
        values[f"{prefix}colour"] = known_colour(thing, catalogue)
    for prefix, place in zip(("", "other-"), places(scene), strict=False):
        values[f"{prefix}place"] = place
    return values


def labels(
    scene: Scene, catalogue: Catalogue, classes: Mapping[str, Sequence[str]]
) -> NDArray[np.int16]:
    """Classes of the slots by number, then letters: `[NUM_COLUMNS]`."""
    values = slot_values(scene, catalogue)
    row = []
    for kind, slot in FIELDS:
        value = values[slot]
        row.append(UNKNOWN if value is None else classes[kind].index(value))
    return np.array(row + spelled(scene.word), np.int16)


def spelled(word: str) -> list[int]:
    """Letters by number, padded with blanks."""
    letters = [ord(letter) - ord("a") for letter in word.lower()]
    return letters + [BLANK] * (LONGEST - len(letters))

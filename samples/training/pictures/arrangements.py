"""What a caption says of an image, as data.

Owns the relations between things, random sampling, and what is held out. All that an `Arrangement`
leaves unsaid is chosen anew for each image (`rendering.py`), so that one caption has many images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from pictures.compositions import Catalogue, Thing, in_held_out_share
from pictures.drawings import SETS, STYLES
from pictures.grounds import Ground, sample_ground

PLACES = ("left", "right", "top", "bottom", "large", "small")
COUNTS: Mapping[str, int] = MappingProxyType({"two": 2, "three": 3, "four": 4, "five": 5})
ORDERED = ("left of", "above", "on", "under", "in", "riding", "holding", "in front of")
"""Relations in which the order of the things matters."""
_TURNED_ROUND: Mapping[str, str] = MappingProxyType({"below": "above", "behind": "in front of"})
"""Relations that are others, of the second thing to the first."""
_CHANCES: Mapping[str, float] = MappingProxyType(
    {
        "": 0.48,
        "next to": 0.08,
        "left of": 0.04,
        "above": 0.03,
        "below": 0.02,
        "on": 0.05,
        "under": 0.03,
        "in": 0.04,
        "riding": 0.05,
        "holding": 0.04,
        "in front of": 0.03,
        "behind": 0.02,
        "between": 0.02,
        "beside each other": 0.02,
        **dict.fromkeys(COUNTS, 0.0125),
    }
)
_NUM_THINGS: Mapping[str, int] = MappingProxyType(
    {"": 1, **dict.fromkeys(COUNTS, 1), "between": 3, "beside each other": 3}
)
_PLACE_SHARE, _STYLE_SHARE, _TINT_SHARE, _SET_WORD_SHARE = 0.2, 0.22, 0.7, 0.2
_OWN_COLOUR_SHARE = 0.25
_FITTING_SHARE = 0.75
_CONTAINERS = (
    *("basket", "bucket", "cup", "boat", "car", "backpack", "gift", "bed", "hat", "boot", "bus"),
    *("truck", "ufo", "house", "tent", "shoe", "taxi", "popcorn", "fries", "castle", "ship"),
)
_MOUNTS = (
    *("bicycle", "motorcycle", "skateboard", "horse", "elephant", "car", "truck", "boat", "rocket"),
    *("cow", "dinosaur", "dragon", "unicorn", "whale", "dolphin", "turtle", "tractor", "train"),
    *("airplane", "ship", "bus", "lion", "tiger", "pig", "sheep", "zebra", "crocodile"),
)
_LIKE_PEOPLE = ("robot", "teddy-bear", "snowman")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is said of an image. `relation` is "" for one thing; "two" to "five" repeat one."""

    relation: str
    things: tuple[Thing, ...]
    ground: Ground = field(default_factory=Ground)
    style: str = ""
    """A style, a set's word, or "" for any."""
    place: str = ""
    """Where or how large one thing is, if that is said."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is held out from training: a fixed sixteenth of all combinations.

        Arrangements that may have the same image are held out together: colours do not count,
        as a thing may be said to have its own, and one is above what is below it.
        """
        return in_held_out_share(*self._named, repr(self.ground), self.style, self.place)

    @property
    def _named(self) -> tuple[str, ...]:
        """The relation and the things' names, alike for all ways of saying so."""
        names = [thing.name for thing in self.things]
        if self.relation in _TURNED_ROUND:
            return _TURNED_ROUND[self.relation], *reversed(names)
        if self.relation == "between":
            return self.relation, names[0], *sorted(names[1:])
        return self.relation, *(names if self.relation in ORDERED else sorted(names))


def sample_arrangement(catalogue: Catalogue, rng: np.random.Generator) -> Arrangement:
    """A random arrangement, held out or not."""
    relation = str(rng.choice(list(_CHANCES), p=list(_CHANCES.values())))
    names = _names(relation, catalogue, rng)
    ground = sample_ground(rng)
    is_placed = not relation and rng.random() < _PLACE_SHARE
    return Arrangement(
        relation,
        tuple(_sample_thing(name, catalogue, ground, rng) for name in names),
        ground,
        _sample_style(rng),
        str(rng.choice(PLACES)) if is_placed else "",
    )


def _sample_style(rng: np.random.Generator) -> str:
    if rng.random() >= _STYLE_SHARE:
        return ""
    if rng.random() < _SET_WORD_SHARE:
        return str(rng.choice([one.word for one in SETS.values() if one.word]))
    return str(rng.choice(STYLES))


def _names(relation: str, catalogue: Catalogue, rng: np.random.Generator) -> list[str]:
    """Names of the things, most of the time such as fit the relation."""
    names = list(catalogue.names)
    if relation in COUNTS:
        names = [name for name in names if catalogue.plurals.get(name) != ""]
    chosen = [str(name) for name in rng.choice(names, _NUM_THINGS.get(relation, 2), replace=False)]
    if rng.random() < _FITTING_SHARE and len(chosen) == 2:
        firsts, seconds = _fitting_names(relation, catalogue)
        first = str(rng.choice(firsts))
        return [first, str(rng.choice([name for name in seconds if name != first]))]
    return chosen


def _fitting_names(relation: str, catalogue: Catalogue) -> tuple[Sequence[str], Sequence[str]]:
    """Names that make sense as the first and the second thing of a relation."""
    kinds = catalogue.categories
    names = catalogue.names
    alive = [n for n in names if kinds[n] in ("animals", "faces") or n in _LIKE_PEOPLE]
    movable = [n for n in names if kinds[n] in ("food", "things", "plants")]
    fitting: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
        "riding": (alive, _MOUNTS),
        "holding": (alive, movable),
        "in": (names, _CONTAINERS),
    }
    return fitting.get(relation, (names, names))


def _sample_thing(
    name: str, catalogue: Catalogue, ground: Ground, rng: np.random.Generator
) -> Thing:
    own = catalogue.own_colours.get(name)
    if own is not None and own != ground.colour and rng.random() < _OWN_COLOUR_SHARE:
        return Thing(name, own)
    colours = [colour for colour in catalogue.colours(name) if colour != ground.colour]
    if not colours or rng.random() >= _TINT_SHARE:
        return Thing(name)
    return Thing(name, str(rng.choice(colours)))

"""True captions of an arrangement, with varied wording.

Owns wording alone: the content comes from `arrangements.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from pictures.arrangements import COUNTS, Arrangement
from pictures.captions import plural, with_article
from pictures.compositions import Catalogue, Thing
from pictures.grounds import Ground

Ways = tuple[tuple[str, int], ...]
_RELATIONS: Mapping[str, Ways] = MappingProxyType(
    {
        "": (("{0}", 8), ("a picture of {0}", 1), ("an image of {0}", 1), ("{0} emoji", 1)),
        "next to": (("{0} next to {1}", 3), ("{0} beside {1}", 1), ("{0} and {1}", 3)),
        "left of": (
            ("{0} left of {1}", 1),
            ("{0} to the left of {1}", 1),
            ("{1} right of {0}", 1),
            ("{1} to the right of {0}", 1),
        ),
        "above": (("{0} above {1}", 2), ("{0} over {1}", 1)),
        "below": (("{0} below {1}", 2), ("{1} over {0}", 1)),
        "on": (("{0} on {1}", 4), ("{0} on top of {1}", 2), ("{0} sitting on {1}", 1)),
        "under": (("{0} under {1}", 3), ("{0} beneath {1}", 1)),
        "in": (("{0} in {1}", 3), ("{0} inside {1}", 1), ("{1} with {0} in it", 1)),
        "riding": (("{0} riding {1}", 4), ("{0} rides {1}", 1)),
        "holding": (("{0} holding {1}", 3), ("{0} with {1}", 1), ("{0} holds {1}", 1)),
        "in front of": (("{0} in front of {1}", 1),),
        "behind": (("{0} behind {1}", 1),),
        "between": (("{0} between {1} and {2}", 1),),
        "beside each other": (("{0}, {1} and {2}", 2), ("{0} and {1} and {2}", 1)),
    }
)
_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"large": ("large", "big", "huge"), "small": ("small", "little", "tiny")}
)
_PLACES: Mapping[str, Ways] = MappingProxyType(
    {
        "left": (("{0} on the left", 2), ("{0} on the left side", 1)),
        "right": (("{0} on the right", 2), ("{0} on the right side", 1)),
        "top": (("{0} at the top", 1),),
        "bottom": (("{0} at the bottom", 1),),
    }
)
_COLOURED: Ways = (
    ("{0} on {1} background", 4),
    ("{0} with {1} background", 1),
    ("{0} against {1} background", 1),
    ("{0} on {2}", 1),
    ("{0}, {2} background", 1),
)
_SCENES: Mapping[str, Ways] = MappingProxyType(
    {
        "meadow": (("{0} on the grass", 1), ("{0} in a meadow", 1), ("{0} in a field", 1)),
        "sea": (("{0} at sea", 1), ("{0} on the sea", 1), ("{0} on the water", 1)),
        "beach": (("{0} on the beach", 2), ("{0} at the beach", 1)),
        "desert": (("{0} in the desert", 1),),
        "snow": (("{0} in the snow", 2), ("{0} in winter", 1)),
        "night": (("{0} at night", 2), ("{0} under the stars", 1)),
        "sunset": (("{0} at sunset", 1),),
        "room": (("{0} in a room", 1), ("{0} indoors", 1)),
    }
)
_STYLES: Mapping[str, Ways] = MappingProxyType(
    {
        "3d": (("{0}, 3d style", 1), ("{0} in 3d", 1), ("a 3d render of {0}", 1)),
        "flat": (("{0}, flat style", 1), ("{0} in flat style", 1), ("a flat drawing of {0}", 1)),
        "cartoon": (("{0}, cartoon style", 1), ("a cartoon of {0}", 2)),
        "outline": (("{0}, outline style", 1), ("an outline drawing of {0}", 2)),
    }
)
_ANY_SET: Ways = (("{0}, {1} style", 1), ("{0} in {1} style", 1))


class Describer:
    """Writes captions of arrangements."""

    def __init__(self, catalogue: Catalogue, rng: np.random.Generator) -> None:
        self._catalogue, self._rng = catalogue, rng

    def describe(self, arrangement: Arrangement) -> str:
        """One of the captions of an arrangement, in lower case, with all that is said."""
        said = [self._thing(thing, arrangement) for thing in arrangement.things]
        ways = _RELATIONS.get(arrangement.relation, _RELATIONS[""])
        text = self._choose(ways).format(*said)
        if arrangement.place in _PLACES:
            text = self._choose(_PLACES[arrangement.place]).format(text)
        text = self._on(arrangement.ground, text)
        if not arrangement.style:
            return text
        return self._choose(_STYLES.get(arrangement.style, _ANY_SET)).format(
            text, arrangement.style
        )

    def _on(self, ground: Ground, text: str) -> str:
        if ground.scene:
            return self._choose(_SCENES[ground.scene]).format(text)
        words = " ".join(word for word in (ground.colour, ground.pattern) if word)
        if not words:
            return text
        return self._choose(_COLOURED).format(text, with_article(words), words)

    def _thing(self, thing: Thing, arrangement: Arrangement) -> str:
        is_plural = arrangement.relation in COUNTS
        name = self._name(thing.name, is_plural=is_plural)
        size = ""
        if arrangement.place in _SIZES:
            size = str(self._rng.choice(_SIZES[arrangement.place]))
        words = " ".join(word for word in (size, thing.colour, name) if word)
        if is_plural:
            return f"{arrangement.relation} {words}"
        return words if self._catalogue.plurals.get(thing.name) == "" else with_article(words)

    def _name(self, name: str, *, is_plural: bool) -> str:
        if is_plural:
            return self._catalogue.plurals.get(name) or plural(name.replace("-", " "))
        others = self._catalogue.other_names.get(name, ())
        if others and self._rng.random() < 0.25:
            return str(self._rng.choice(list(others)))
        return name.replace("-", " ")

    def _choose(self, ways: Ways) -> str:
        weights = np.array([weight for _, weight in ways], np.float64)
        return ways[int(self._rng.choice(len(ways), p=weights / weights.sum()))][0]

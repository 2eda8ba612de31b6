"""True captions of a composition, with varied wording.

Owns wording alone: the content comes from `compositions.py`.
"""

from __future__ import annotations

import numpy as np

from pictures.compositions import COUNTS, Catalogue, Composition, Thing

_VOWELS = "aeiou"
_SCENES = {
    "pair": (
        ("{0} next to {1}", 3),
        ("{0} beside {1}", 1),
        ("{0} and {1}", 2),
        ("{0} left of {1}", 1),
        ("{0} to the left of {1}", 1),
        ("{1} right of {0}", 1),
        ("{1} to the right of {0}", 1),
    ),
    "stack": (
        ("{0} above {1}", 3),
        ("{0} over {1}", 1),
        ("{0} on top of {1}", 1),
        ("{1} below {0}", 2),
        ("{1} under {0}", 1),
    ),
    "left": (("{0} on the left", 2), ("{0} on the left side", 1)),
    "right": (("{0} on the right", 2), ("{0} on the right side", 1)),
    "top": (("{0} at the top", 1),),
    "bottom": (("{0} at the bottom", 1),),
}
_PLAIN = (("{0}", 6), ("a picture of {0}", 1), ("an image of {0}", 1), ("{0} emoji", 1))
_SIZES = {"large": ("large", "big", "huge"), "small": ("small", "little", "tiny")}
_GROUNDS = (
    ("{0} on {1} background", 4),
    ("{0} with {1} background", 1),
    ("{0} against {1} background", 1),
    ("{0} in front of {1} background", 1),
    ("{0} on {2}", 1),
    ("{0}, {2} background", 1),
)
_FLAT = (
    ("{0}, flat style", 2),
    ("{0} in flat style", 1),
    ("a flat drawing of {0}", 2),
)
_SOLID = (("{0}", 12), ("{0}, 3d style", 1), ("{0} in 3d", 1), ("a 3d render of {0}", 1))


class Writer:
    """Writes captions of compositions."""

    def __init__(self, catalogue: Catalogue, rng: np.random.Generator) -> None:
        self._catalogue, self._rng = catalogue, rng

    def caption(self, composition: Composition) -> str:
        """One of the many captions of a composition, in lower case."""
        said = [self._thing(thing, composition.layout) for thing in composition.things]
        text = self._choose(_SCENES.get(composition.layout, _PLAIN)).format(*said)
        is_said = composition.background != "white" or self._rng.random() < 0.4
        if is_said:
            ground = composition.background
            text = self._choose(_GROUNDS).format(text, with_article(ground), ground)
        return self._choose(_FLAT if composition.style == "flat" else _SOLID).format(text)

    def _thing(self, thing: Thing, layout: str) -> str:
        name = self._name(thing.name, is_plural=layout in COUNTS)
        colour = thing.colour
        if colour is None and self._rng.random() < 0.3:
            colour = self._catalogue.own_colours.get(thing.name)
        size = str(self._rng.choice(_SIZES[layout])) if layout in _SIZES else ""
        words = " ".join(word for word in (size, colour, name) if word)
        if layout in COUNTS:
            return f"{layout} {words}"
        return words if self._catalogue.plurals.get(thing.name) == "" else with_article(words)

    def _name(self, name: str, *, is_plural: bool) -> str:
        others = self._catalogue.other_names.get(name, ())
        if is_plural:
            return self._catalogue.plurals.get(name) or plural(name.replace("-", " "))
        if others and self._rng.random() < 0.25:
            return str(self._rng.choice(list(others)))
        return name.replace("-", " ")

    def _choose(self, ways: tuple[tuple[str, int], ...]) -> str:
        weights = np.array([weight for _, weight in ways], np.float64)
        return ways[int(self._rng.choice(len(ways), p=weights / weights.sum()))][0]


def with_article(words: str) -> str:
    """The words after "a" or "an"."""
    is_vowel = words[0] in _VOWELS and not words.startswith(("uni", "ufo"))
    return f"{'an' if is_vowel else 'a'} {words}"


def plural(words: str) -> str:
    """The plural of a regular noun."""
    if words.endswith(("s", "x", "ch", "sh")):
        return words + "es"
    if words.endswith("y") and words[-2] not in _VOWELS:
        return words[:-1] + "ies"
    return words + "s"

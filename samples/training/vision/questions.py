"""Questions about images with their correct answers, in varied wording.

Owns the templates, and the rule for a correct answer. Answers come from a scene's composition,
never from a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from labels import known_colour, places
from pictures.captions import plural, with_article
from pictures.compositions import COUNTS, Catalogue
from scenes import Scene

_PLACES = {
    "middle": "in the middle",
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
}
_SENSES = {"pair": ("to the left of", "to the right of"), "stack": ("above", "below")}
_NUMBERS = {"two": "2", "three": "3", "four": "4", "one": "1"}


@dataclass(frozen=True, slots=True)
class Question:
    """`kind` is what is asked for; a correct answer has one word of each of `accepted`."""

    kind: str
    text: str
    answer: str
    accepted: tuple[tuple[str, ...], ...]

    def is_right(self, said: str) -> bool:
        """Whether the answer is correct; yes or no must come first."""
        words = re.sub(r"[^a-z0-9 ]+", " ", said.lower()).split()
        if self.kind == "yes or no":
            return words[:1] == list(self.accepted[0])
        line = f" {' '.join(words)} "
        return all(any(f" {word} " in line for word in group) for group in self.accepted)


class Asker:
    """Makes the questions that fit a scene."""

    def __init__(self, catalogue: Catalogue, rng: np.random.Generator) -> None:
        self._catalogue, self._rng = catalogue, rng
        self._askers: Sequence[Callable[[Scene], Iterator[Question]]] = (
            self._names,
            self._colours,
            self._counts,
            self._positions,
            self._grounds,
            self._words,
            self._yes_or_no,
            self._descriptions,
        )

    def questions(self, scene: Scene) -> list[Question]:
        """One of each kind that fits, in random order."""
        found = [question for ask in self._askers for question in ask(scene)]
        self._rng.shuffle(found)  # type: ignore[arg-type]
        return found

    def _names(self, scene: Scene) -> Iterator[Question]:
        one = scene.composition
        if len(one.things) != 1:
            return
        name = one.things[0].name
        said = self._many(name) if one.layout in COUNTS else self._with_article(name)
        text = self._choose(
            "What is this?",
            "What is in the picture?",
            "What do you see?",
            "What is shown here?",
            "Which object is in the picture?",
        )
        yield Question("name", text, f"{_large(said)}.", (self._accepted(name),))

    def _colours(self, scene: Scene) -> Iterator[Question]:
        one = scene.composition
        named = [(t.name, known_colour(t, self._catalogue)) for t in one.things]
        known = [(name, colour) for name, colour in named if colour]
        if not known or one.layout in COUNTS:
            return
        name, colour = known[self._rng.integers(len(known))]
        text = self._choose(
            "What color is the {0}?", "What colour is the {0}?", "Which color does the {0} have?"
        )
        yield Question("colour", text.format(_said(name)), f"{_large(colour)}.", ((colour,),))

    def _counts(self, scene: Scene) -> Iterator[Question]:
        one = scene.composition
        if len(one.things) != 1 or (one.layout not in COUNTS and self._rng.random() < 0.7):
            return
        count = one.layout if one.layout in COUNTS else "one"
        many = self._many(one.things[0].name)
        text = self._choose("How many {0} are there?", "How many {0} do you see?", "Count the {0}.")
        yield Question("count", text.format(many), f"{_large(count)}.", ((count, _NUMBERS[count]),))

    def _positions(self, scene: Scene) -> Iterator[Question]:
        found = places(scene)
        if not found:
            return
        index = int(self._rng.integers(len(found)))
        name, place = scene.composition.things[index].name, found[index]
        if len(found) == 2 and self._rng.random() < 0.6:
            text = self._choose("What is {0}?", "Which object is {0}?").format(_PLACES[place])
            answer = f"{_large(self._with_article(name))}."
            yield Question("position", text, answer, (self._accepted(name),))
            return
        text = self._choose("Where is the {0}?", "Where in the picture is the {0}?")
        accepted = (place, "center", "centre") if place == "middle" else (place,)
        answer = f"{_large(_PLACES[place])}."
        yield Question("position", text.format(_said(name)), answer, (accepted,))

    def _grounds(self, scene: Scene) -> Iterator[Question]:
        ground = scene.composition.background
        text = self._choose("What color is the background?", "What colour is the background?")
        yield Question("background", text, f"{_large(ground)}.", ((ground,),))

    def _words(self, scene: Scene) -> Iterator[Question]:
        if not scene.word:
            return
        word = scene.word.lower()
        text = self._choose(
            "What does it say?", "Read the text.", "What is written here?", "Which word is this?"
        )
        yield Question("reading", text, f'It says "{word}".', ((word,),))

    def _yes_or_no(self, scene: Scene) -> Iterator[Question]:
        one = scene.composition
        if not one.things:
            return
        is_true = self._rng.random() < 0.5
        if one.layout in _SENSES and self._rng.random() < 0.4:
            first, second = (_said(thing.name) for thing in one.things)
            sense = _SENSES[one.layout][0 if is_true else 1]
            text = f"Is the {first} {sense} the {second}?"
        else:
            shown = [thing.name for thing in one.things]
            others = [name for name in self._catalogue.names if name not in shown]
            name = str(self._rng.choice(shown if is_true else others))
            text = self._choose("Is there {0} in the picture?", "Do you see {0}?")
            text = text.format(self._with_article(name))
        answer = "yes" if is_true else "no"
        yield Question("yes or no", text, f"{_large(answer)}.", ((answer,),))

    def _descriptions(self, scene: Scene) -> Iterator[Question]:
        one = scene.composition
        shown = [self._shown(scene, index) for index in range(len(one.things))]
        ground = f"{with_article(one.background)} background"
        parts = [" and ".join(shown)] if shown else []
        parts += [f'the word "{scene.word.lower()}"'] if scene.word else []
        text = self._choose(
            "Describe the picture.", "Describe this image.", "What does the picture show?"
        )
        answer = f"{_large(' and '.join(parts))} on {ground}."
        named = [self._accepted(thing.name) for thing in one.things]
        printed = [(scene.word.lower(),)] if scene.word else []
        accepted = (*named, *printed, (one.background,))
        yield Question("description", text, answer, accepted)

    def _shown(self, scene: Scene, index: int) -> str:
        one, found = scene.composition, places(scene)
        thing = one.things[index]
        colour = known_colour(thing, self._catalogue) or ""
        if one.layout in COUNTS:
            said = f"{one.layout} {colour} {self._many(thing.name)}"
        else:
            said = self._with_article(thing.name, one.layout, colour)
        is_placed = bool(found) and found[index] != "middle"
        return " ".join(f"{said} {_PLACES[found[index]] if is_placed else ''}".split())

    def _with_article(self, name: str, layout: str = "", colour: str = "") -> str:
        size = layout if layout in ("large", "small") else ""
        words = " ".join(filter(None, (size, colour, _said(name))))
        return words if self._catalogue.plurals.get(name) == "" else with_article(words)

    def _many(self, name: str) -> str:
        return self._catalogue.plurals.get(name) or plural(_said(name))

    def _accepted(self, name: str) -> tuple[str, ...]:
        others = self._catalogue.other_names.get(name, ())
        return (_said(name), self._many(name), *others)

    def _choose(self, *ways: str) -> str:
        return ways[int(self._rng.integers(len(ways)))]


def _said(name: str) -> str:
    return name.replace("-", " ")


def _large(text: str) -> str:
    return text[0].upper() + text[1:]

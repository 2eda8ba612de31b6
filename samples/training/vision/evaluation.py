"""Evaluation: questions about unseen compositions, names of unseen renderings, and of drawings.

Owns the bars. Everything is asked of the model as it is served, with greedy answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from looks import UNSEEN_LOOK, Looks
from pictures.captions import with_article
from pictures.compositions import BACKGROUNDS, Catalogue, Composition, Thing
from PIL import Image
from questions import Asker, Question
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scenes import Scene, draw, sample_scene
from words import UNSEEN_FONT, is_held_out, write

from triptych import ImagePipeline
from triptych.modalities.vlm.api.pipeline import VisionPipeline

NUM_QUESTIONS = 300
NUM_DRAWN = 100
_NUM_WORDS = 60
_MAX_TOKENS = 40
See = Callable[[Image.Image, str], str]
Case = tuple[Image.Image, Question]


def evaluate(
    model: str, catalogue: Catalogue, looks: Looks, lexicon: Sequence[str], *, draws: bool
) -> None:
    """Print how much is right; with `draws` also whether what `imagine` draws is named."""
    cases: dict[str, Iterator[Case]] = {
        "held-out compositions": held_out_cases(catalogue, looks, lexicon),
        "unseen renderings (Twemoji)": name_cases(catalogue, looks, UNSEEN_LOOK),
        "the same, seen renderings": name_cases(catalogue, looks, "3d"),
        "unseen words, unseen font": word_cases(lexicon),
    }
    if draws:
        cases["what imagine draws"] = drawn_cases(catalogue)
    table = Table("cases", "asked", "right", "by kind", "wrong")
    with VisionPipeline.from_pretrained(model) as pipeline:

        def see(picture: Image.Image, question: str) -> str:
            reply = pipeline(picture, question, max_tokens=_MAX_TOKENS, temperature=0.0)
            return str(reply.text)

        for label, found in cases.items():
            table.add_row(label, *score(see, list(found), label))
    Console().print(table)


def score(see: See, cases: Sequence[Case], label: str) -> tuple[str, str, str, str]:
    """How many were asked, the share that is right, the same by kind, and some that is wrong."""
    marks: Mapping[str, list[bool]] = defaultdict(list)
    wrong = []
    for picture, question in track(cases, label):
        said = see(picture, question.text)
        marks[question.kind].append(question.is_right(said))
        if not marks[question.kind][-1]:
            wrong.append(f"{question.text} {question.answer} ({said[:40]})")
    every = [mark for kind in marks.values() for mark in kind]
    kinds = ", ".join(
        f"{kind} {np.mean(found):.0%} of {len(found)}" for kind, found in marks.items()
    )
    return str(len(every)), f"{np.mean(every):.1%}", kinds, "\n".join(wrong[:8])


def held_out_cases(catalogue: Catalogue, looks: Looks, lexicon: Sequence[str]) -> Iterator[Case]:
    """Questions about pictures that training never showed, one a picture, of all kinds alike."""
    rng = np.random.default_rng(1)
    asker = Asker(catalogue, rng)
    wanted: dict[str, int] = {}
    while sum(wanted.values()) < NUM_QUESTIONS:
        scene = sample_scene(catalogue, lexicon, rng)
        if not scene.is_held_out:
            continue
        fitting = asker.questions(scene)
        question = min(fitting, key=lambda one: wanted.get(one.kind, 0))
        wanted[question.kind] = wanted.get(question.kind, 0) + 1
        yield draw(scene, catalogue, looks), question


def name_cases(catalogue: Catalogue, looks: Looks, look: str) -> Iterator[Case]:
    """Every object once, alone."""
    rng = np.random.default_rng(2)
    asker = Asker(catalogue, rng)
    for name in catalogue.names:
        ground = str(rng.choice(list(BACKGROUNDS)))
        scene = Scene(Composition("single", (Thing(name),), ground), look)
        named = next(one for one in asker.questions(scene) if one.kind == "name")
        yield draw(scene, catalogue, looks), named


def word_cases(lexicon: Sequence[str]) -> Iterator[Case]:
    """Words that training never showed, in a font that it never showed."""
    unseen = [word for word in lexicon if is_held_out(word)][:_NUM_WORDS]
    for word in unseen:
        picture = Image.new("RGB", (224, 224), "white")
        write(picture, word, UNSEEN_FONT, (0, 0, 0), (0.5, 0.5, 0.8))
        yield picture, Question("reading", "What does it say?", word, ((word,),))


def drawn_cases(catalogue: Catalogue) -> Iterator[Case]:
    """Drawings of objects, and what they were meant to be."""
    rng = np.random.default_rng(3)
    asker = Asker(catalogue, rng)
    names = rng.choice(list(catalogue.names), NUM_DRAWN, replace=False)
    with ImagePipeline.from_pretrained() as imagine:
        for seed, name in enumerate(names.tolist()):
            scene = Scene(Composition("single", (Thing(name),)))
            named = next(one for one in asker.questions(scene) if one.kind == "name")
            (picture,) = imagine(with_article(name.replace("-", " ")), seed=seed)
            yield picture.image, named


def joined(eyes: Path, language: Path, folder: Path) -> Path:
    """The eyes and the language model as one folder, for a model that is not installed."""
    from triptych.modalities.vlm.source import join

    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    join(eyes, language, folder)
    return folder

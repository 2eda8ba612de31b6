"""The sentences for training, and the fifty held-out ones.

Owns the sources: example sentences and glosses of WordNet 3.0 (Debian package `wordnet-base`,
whose licence allows any use), and sentences generated from `made.toml`: questions, numbers, times,
names, commands. The models see only phonemes of them.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_QUOTED = re.compile(r'"([^"]+)"')
_PARENTHESES = re.compile(r"\([^)]*\)")
_PLAIN = re.compile(r"^[A-Za-z0-9 ,.'?!;:$%-]+$")
_PARTS = ("noun", "verb", "adj", "adv")


def training_sentences(wordnet: Path, num_made: int, seed: int = 0) -> list[str]:
    """All training sentences, shuffled, without the held-out ones.

    `wordnet` is the folder of `data.noun` and its siblings.
    """
    held_out = {_key(sentence) for sentence in held_out_sentences()}
    sentences = [*wordnet_sentences(wordnet), *made_sentences(num_made, seed)]
    unique = {_key(sentence): sentence for sentence in sentences}
    kept = [sentence for key, sentence in unique.items() if key not in held_out]
    random.Random(seed).shuffle(kept)
    return kept


def held_out_sentences() -> list[str]:
    """The fifty sentences of the evaluation, written for it."""
    path = Path(__file__).with_name("held_out.txt")
    return path.read_text(encoding="utf-8").split("\n")[:50]


def wordnet_sentences(folder: Path) -> Iterator[str]:
    """Example sentences and, for variety of rhythm, glosses, as spoken sentences."""
    for part in _PARTS:
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            _, bar, gloss = line.partition(" | ")
            if not bar:
                continue
            quotes = _QUOTED.findall(gloss)
            definition = _PARENTHESES.sub("", _QUOTED.sub("", gloss)).split(";")[0]
            for text in [*quotes, definition] if part != "noun" else quotes or [definition]:
                if (sentence := _as_sentence(text)) is not None:
                    yield sentence


def made_sentences(count: int, seed: int) -> Iterator[str]:
    """Sentences from the templates."""
    rng = random.Random(seed)
    made = tomllib.loads(Path(__file__).with_name("made.toml").read_text(encoding="utf-8"))
    for _ in range(count):
        template = rng.choice(made["templates"])
        yield re.sub(r"\{(\w+)\}", lambda slot: _fill(slot[1], made["words"], rng), template)


def _fill(slot: str, words: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    if slot in words:
        return rng.choice(words[slot])
    makers: dict[str, Callable[[], str]] = {
        "number": lambda: f"{int(10 ** rng.uniform(0, 5)):,}",
        "digit": lambda: str(rng.randrange(10)),
        "hour": lambda: str(rng.randrange(1, 13)),
        "minute": lambda: f"{rng.randrange(60):02d}",
        "percent": lambda: str(rng.randrange(1, 100)),
        "year": lambda: str(rng.randrange(1700, 2050)),
        "ordinal": lambda: _ordinal(rng.randrange(1, 32)),
    }
    return makers[slot]()


def _ordinal(number: int) -> str:
    suffixes = {1: "st", 2: "nd", 3: "rd"}
    suffix = "th" if 10 < number < 14 else suffixes.get(number % 10, "th")
    return f"{number}{suffix}"


def _as_sentence(text: str) -> str | None:
    text = " ".join(text.replace("--", ", ").split()).strip(" ;,")
    if not _PLAIN.match(text) or not 2 <= len(text.split()) <= 26:
        return None
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".?!" else f"{text}."


def _key(sentence: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", sentence.lower()).strip()

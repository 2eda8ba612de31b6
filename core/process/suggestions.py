"""The known name that a mistyped name most likely stands for.

Owns the measure of likeness. A suggestion never leads to another meaning: two names are alike only
if each word of one is that of the other, a misspelling of it, or at least its first half, and a
known word is not a misspelling of another. Names are words joined by dashes, underscores, dots or
colons. Knows no names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import SequenceMatcher
from functools import partial

_ALIKE, _ALIKE_IF_SHORT = 0.8, 0.74
"""The least likeness of a misspelled word; if short, one exchange of letters in a word of four."""
_SHORT_CHARS = 5
_CUT_CHARS = 3
"""The fewest letters of a word that was cut short: many words begin with the same two."""
_MAX_CHARS = 80
"""Longer names are not compared: it takes time that grows with their square."""
_SEPARATORS = re.compile(r"[-_.: ]+")


def nearest(word: str, words: Iterable[str], vocabulary: Iterable[str] = ()) -> str | None:
    """Return the entry of `words` that `word` most likely stands for; `None` if there is none.

    `vocabulary` has further names, whose words are no misspellings either.
    """
    if len(word) > _MAX_CHARS:
        return None
    known = list(dict.fromkeys(words))
    terms = {term for name in (*known, *vocabulary) for term in words_of(name)}
    typed = words_of(word)
    alike = [name for name in known if _is_spelling_of(typed, words_of(name), terms)]
    ranked = sorted(((_rank(word, name), name) for name in alike), reverse=True)
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):  # equally likely
        return None
    return ranked[0][1]


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lower case."""
    return [part for part in _SEPARATORS.split(name.lower()) if part]


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _rank(word: str, name: str) -> tuple[bool, bool, float]:
    """Return what orders similar names: letters that changed places, a beginning, the likeness."""
    return sorted(word) == sorted(name), name.startswith(word), _likeness(word, name)


def _is_spelling_of(typed: Sequence[str], name: Sequence[str], terms: Collection[str]) -> bool:
    """Whether both have the same words, in any order, up to misspellings and separators."""
    if "".join(typed) == "".join(name):
        return True
    if len(typed) != len(name):
        return False
    left = list(name)
    for word in typed:
        same = [each for each in left if _is_same(word, each, terms)]
        if not same:
            return False
        left.remove(max(same, key=partial(_likeness, word)))
    return True


def _is_same(word: str, known: str, terms: Collection[str]) -> bool:
    if word == known or word.rstrip("s") == known.rstrip("s"):
        return True
    if word in terms:
        return False
    least = _ALIKE_IF_SHORT if len(word) <= _SHORT_CHARS else _ALIKE
    return _likeness(word, known) >= least or _is_first_half(word, known)


def _is_first_half(word: str, known: str) -> bool:
    return len(word) >= _CUT_CHARS and 2 * len(word) >= len(known) and known.startswith(word)

"""Suggestions for a model that was not found, out of the names of known ones.

Owns their words. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.process.suggestions import nearest, words_of


def near_models(name: str, known: Sequence[str]) -> list[str]:
    """Return the `known` names that `name` resembles: misspelled ones, or all that it begins."""
    if (near := nearest(name, known)) is not None:
        return [near]
    parts = set(words_of(name))
    return [each for each in known if parts and parts <= set(words_of(each))]


def advice(name: str, known: Sequence[str]) -> str:
    """Return a sentence with the names that `name` resembles, or else with all of them.

    Empty for hub ids, which resemble no short name.
    """
    if "/" in name or not known:
        return ""
    if near := near_models(name, known):
        return f" Did you mean {' or '.join(near)}?"
    return f" Models with a short name: {', '.join(known)}."

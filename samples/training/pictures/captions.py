"""English words in captions: articles and plurals."""

from __future__ import annotations

_VOWELS = "aeiou"


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

"""Reads words of languages whose spelling gives their sound, by rules in a table.

Owns the form of the rules and the scan: stress is marked in each word first, then one pass over a
clause replaces letters by phonemes, with the neighbouring words in view. Each of `languages/` has a
table. Knows no language in particular.
"""

# ruff: noqa: RUF001, RUF002  # phonetic letters and signs are the subject here
from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from string import ascii_lowercase

import msgspec

STRESS = "ˈ"
ACCENT = -1
"""The stressed syllable of a word is the one with a written accent."""
_JOINT = re.compile("(['’-])")


class Spelling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The spelling of a language, in lower case.

    `nucleus` matches the syllables of a word; the last of its groups that took part is the vowel.
    `stress` are pairs of a pattern of words and the stressed syllable, from the end of the word.
    Words of `unstressed` have none; `words` have the given phonemes, and may end in a look at the
    next word. `respelled` are pairs of a pattern and other letters. `letters` are the names of "a"
    to "z", by which words without a vowel are spelled out.

    `rules` are pairs of a pattern of letters and its phonemes: at each letter the first that
    matches. In a pattern a space is the border of two words, and "ˈ" precedes the stressed vowel.
    With `vowels`, those of the phonemes, stress is set in the phonemes instead of the letters.
    """

    rules: tuple[tuple[str, str], ...]
    nucleus: str
    stress: tuple[tuple[str, int], ...]
    unstressed: str = ""
    words: dict[str, str] = {}
    respelled: tuple[tuple[str, str], ...] = ()
    letters: str = ""
    vowels: str = ""


class SpellingReader:
    """Reads clauses of one language. Stateless after construction, thread-safe."""

    def __init__(self, spelling: Spelling) -> None:
        self._known = frozenset(word.partition("(?")[0] for word in spelling.words)
        self._unstressed = frozenset(spelling.unstressed.split())
        self._stress = [(re.compile(word), at) for word, at in spelling.stress]
        self._respelled = [(re.compile(word), letters) for word, letters in spelling.respelled]
        self._nucleus = re.compile(spelling.nucleus)
        self._vowel = re.compile(f"[{spelling.vowels}]") if spelling.vowels else None
        self._letters = dict(zip(ascii_lowercase, spelling.letters.split(), strict=False))
        words = sorted(spelling.words.items(), key=lambda item: -len(item[0]))
        rules = [*((rf"(?<![^ ]){word}(?![^ ])", sound) for word, sound in words), *spelling.rules]
        self._sounds = [sound for _, sound in rules]
        self._rule = re.compile("|".join(f"({pattern})" for pattern, _ in rules))

    def __call__(self, words: Sequence[str]) -> list[str]:
        """The phonemes of each word of a clause; empty for one without known letters."""
        parts = [(at, *part) for at, word in enumerate(words) for part in self._parts(word)]
        sounds = self._read([letters for _, letters, _ in parts])
        read = [""] * len(words)
        for (at, letters, glue), sound in zip(parts, sounds, strict=True):
            if sound:
                read[at] += (glue if read[at] else "") + self._stressed(letters, sound)
        return read

    def _read(self, words: Sequence[str]) -> list[str]:
        """The phonemes of each word, of letters with stress."""
        clause, sounds = " ".join(words), [""] * len(words)
        at = index = 0
        while at < len(clause):
            match = self._rule.match(clause, at)
            end = at + 1
            if match is not None and match.end() > at:
                end = match.end()
                sounds[index] += self._sounds[(match.lastindex or 1) - 1]
            elif clause[at] == STRESS:
                sounds[index] += STRESS
            index += clause.count(" ", at, end)
            at = end
        return sounds

    def _parts(self, word: str) -> list[tuple[str, str]]:
        """The words within `word`, each with what joins its sound to that of the one before it.

        Apostrophes and hyphens separate words; one without a vowel is read letter by letter, unless
        an apostrophe follows it.
        """
        parts: list[tuple[str, str]] = []
        glue = " "
        pieces = _JOINT.split(unicodedata.normalize("NFC", word).lower().replace("’", "'"))
        for piece, following in zip(pieces, (*pieces[1:], ""), strict=True):
            if piece in ("'", "-"):
                glue = "" if piece == "'" else " "
            elif piece in self._known or following == "'" or self._nucleus.search(piece):
                parts.append((self._marked(piece), glue))
            else:
                names = (self._letters.get(letter, letter) for letter in piece)
                parts += ((self._marked(name, is_name=True), " ") for name in names)
        return parts

    def _marked(self, letters: str, *, is_name: bool = False) -> str:
        """`letters` as respelled, with "ˈ" before the stressed vowel; names always have one."""
        if letters in self._known:
            return letters
        is_stressed = (is_name or letters not in self._unstressed) and not self._vowel
        for word, respelled in self._respelled:
            letters = word.sub(respelled, letters)
        found = self._nucleus.finditer(letters)
        vowels = [match.start(match.lastindex) for match in found if match.lastindex]
        if not vowels or not is_stressed:
            return letters
        syllable = self._syllable(letters)
        accents = [at for at in vowels if not letters[at].isascii()]
        at = (accents or vowels)[-1] if syllable == ACCENT else vowels[-min(syllable, len(vowels))]
        return letters[:at] + STRESS + letters[at:]

    def _stressed(self, letters: str, sound: str) -> str:
        """`sound` with "ˈ" before its stressed vowel, where stress follows the sounds."""
        if self._vowel is None or STRESS in sound or letters in self._unstressed:
            return sound
        vowels = [match.start() for match in self._vowel.finditer(sound)]
        if not vowels:
            return sound
        at = vowels[-min(self._syllable(letters), len(vowels))]
        return sound[:at] + STRESS + sound[at:]

    def _syllable(self, letters: str) -> int:
        return next((at for word, at in self._stress if word.fullmatch(letters)), 1)

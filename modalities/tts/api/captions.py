"""Captions of speech: its words, grouped into cues.

Owns where a cue ends. `core.media.captions` writes the files. Knows no models.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import pairwise

from triptych.core.media.captions import CAPTION_FORMATS, CaptionFormat, Cue
from triptych.modalities.tts.api.results import SpokenWord
from triptych.modalities.tts.api.text.chunks import CLOSERS, SENTENCE_ENDS

MAX_CUE_LETTERS = 84
"""Two lines of 42, the limit of the Timed Text Style Guide of Netflix."""
MAX_CUE_S = 7.0
_PAUSE_S = 0.6


def caption_file(words: Iterable[SpokenWord], kind: CaptionFormat) -> str:
    """The captions of speech with `words`, as the text of a file."""
    return CAPTION_FORMATS[kind](_cues(words))


def _cues(words: Iterable[SpokenWord]) -> Iterator[Cue]:
    """A cue for each sentence, or for a part of it that fits."""
    held: list[SpokenWord] = []
    for word in words:
        if held and not _fits(held, word):
            yield _cue(held)
            held = []
        held.append(word)
    if held:
        yield _cue(held)


def _fits(held: list[SpokenWord], word: SpokenWord) -> bool:
    """Whether `word` is of the cue of the words before it."""
    last = held[-1]
    is_near = word.start_s - last.end_s <= _PAUSE_S and word.end_s - held[0].start_s <= MAX_CUE_S
    is_short = len(_text([*held, word])) <= MAX_CUE_LETTERS
    return is_near and is_short and not last.text.rstrip(CLOSERS).endswith(SENTENCE_ENDS)


def _cue(words: list[SpokenWord]) -> Cue:
    return Cue(words[0].start_s, words[-1].end_s, _text(words))


def _text(words: list[SpokenWord]) -> str:
    """The words with spaces, but for those of languages that are written without."""
    text = words[0].text
    for before, word in pairwise(words):
        is_wide = _is_wide(before.text[-1:]) and _is_wide(word.text[:1])
        text += word.text if is_wide else f" {word.text}"
    return text


def _is_wide(char: str) -> bool:
    return char != "" and unicodedata.east_asian_width(char) in "WF"

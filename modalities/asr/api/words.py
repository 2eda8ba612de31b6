"""Joining timed tokens to timed words.

Owns where a word ends, which punctuation belongs to it, and its longest duration; after OpenAI's
`timing.py`. Knows no model.
"""

from __future__ import annotations

import statistics
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from triptych.modalities.asr.languages import UNSPACED
from triptych.modalities.asr.wire import TranscriptToken

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_SENTENCE_ENDS = ".。!！?？"  # noqa: RUF001
_MAX_MEDIAN_S = 0.7


@dataclass(frozen=True, slots=True)
class WordTiming:
    """A word with its times, the space before it and the punctuation around it."""

    text: str
    start_s: float
    end_s: float


def words_of(
    tokens: Sequence[TranscriptToken], decode: Decode, language: str
) -> tuple[WordTiming, ...]:
    """The words of one segment, whose tokens must have times."""
    pieces = list(_characters(tokens, decode))
    words = pieces if language in UNSPACED else list(_joined(pieces))
    return tuple(_within_reason(_with_punctuation(words)))


def _characters(tokens: Sequence[TranscriptToken], decode: Decode) -> Iterator[WordTiming]:
    """The shortest runs of tokens that decode to whole characters.

    Each is decoded after the token before it: alone, some vocabularies drop the space it begins
    with.
    """
    run: list[TranscriptToken] = []
    before: list[int] = []
    for token in tokens:
        run.append(token)
        text = _decode_after(before, run, decode)
        if BROKEN not in text:
            yield WordTiming(text, run[0].start_s, run[-1].end_s)
            run, before = [], [token.token_id]
    if run:  # a character that was never finished
        text = _decode_after(before, run, decode).replace(BROKEN, "")
        if text.strip():
            yield WordTiming(text, run[0].start_s, run[-1].end_s)


def _decode_after(before: list[int], run: Sequence[TranscriptToken], decode: Decode) -> str:
    both = decode([*before, *(piece.token_id for piece in run)])
    return both[len(decode(before)) :] if before else both


def _joined(pieces: Sequence[WordTiming]) -> Iterator[WordTiming]:
    """Pieces joined up to the next space or punctuation mark."""
    word: WordTiming | None = None
    for piece in pieces:
        is_new = piece.text.startswith(" ") or piece.text in string.punctuation
        if word is not None and (not is_new or word.text.isspace()):
            word = WordTiming(word.text + piece.text, word.start_s, piece.end_s)
            continue
        if word is not None:
            yield word
        word = piece
    if word is not None:
        yield word


def _with_punctuation(words: Sequence[WordTiming]) -> list[WordTiming]:
    """Punctuation marks joined to their words, without changing the words' times."""
    merged: list[WordTiming] = []
    opening = ""
    for word in words:
        mark = word.text.strip()
        if word.text.startswith(" ") and mark and mark in _OPENING:
            opening += word.text
        elif merged and not opening and mark and word.text in _CLOSING:
            merged[-1] = replace(merged[-1], text=merged[-1].text + word.text)
        else:
            merged.append(replace(word, text=opening + word.text))
            opening = ""
    if opening and merged:
        merged[-1] = replace(merged[-1], text=merged[-1].text + opening)
    return merged


def _within_reason(words: Sequence[WordTiming]) -> Iterator[WordTiming]:
    """Shorten words next to a pause: at the ends of a sentence to twice the median length."""
    lengths = [word.end_s - word.start_s for word in words if word.end_s > word.start_s]
    longest_s = 2 * min(statistics.median(lengths), _MAX_MEDIAN_S) if lengths else 0.0
    is_first = True
    for word in words:
        is_last = word.text[-1:] in _SENTENCE_ENDS
        if word.end_s - word.start_s <= longest_s:
            yield word
        elif is_first:
            yield replace(word, start_s=word.end_s - longest_s)
        elif is_last:
            yield replace(word, end_s=word.start_s + longest_s)
        else:
            yield word
        is_first = is_last

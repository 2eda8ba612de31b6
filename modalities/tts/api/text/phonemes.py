"""Converts spoken text to phonemes, word by word, each with its letters.

Owns how words and marks are separated, how unknown letters are handled, and the bounded cache of
earlier readings. The package hibari pronounces English words: misaki's lexicon and rules, and a
small network for words in no dictionary, which is loaded once, on the first such word. `spelling`
and `readers` pronounce those of other languages. Knows no model; symbols are those of Kokoro's
alphabet.

The input has been normalized: digits and signs are words already.
"""

# ruff: noqa: RUF001  # typographic signs and phonetic letters are the subject here
from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.process.once import once
from triptych.modalities.tts.api.text.readers import OPENERS, Reader
from triptych.modalities.tts.api.text.spelling import SpellingReader
from triptych.modalities.tts.api.text.spoken import Pronunciation, Span, SpokenText
from triptych.modalities.tts.api.text.tongues import Dialect, Reading, is_english, tongue

if TYPE_CHECKING:
    from hibari.g2p import G2P

CACHE_SIZE = 2048
MAX_WORD_CHARACTERS = 40
"""Longer words are read in pieces: reading takes cubic time in the number of a word's parts."""
_CHUNK = re.compile(r"\S+")
_PIECE = re.compile(
    rf"[^\W_](?:[\w\u0300-\u036f\u0900-\u0963]|['’-](?=[^\W_])){{0,{MAX_WORD_CHARACTERS - 1}}}|\S"
)
_MARKS = {
    **{mark: mark for mark in ".,;:!?…—()"},
    **dict(zip("。、！？，；：", (". ", ", ", "! ", "? ", ", ", "; ", ": "), strict=True)),
    "–": "—",
}
_OPENING, _CLOSING = _QUOTES = "“", "”"
MARKS = frozenset(_MARKS.values()) | frozenset(_QUOTES)
"""Symbols of marks: they have no sound of their own."""
_LETTER = re.compile(r"[A-Z](?:'s)?\Z")
_LETTER_A = "ˈA"
_PLAIN_LATIN_END = 0x17F  # letters beyond it are read without their accents


class PhonemeWord(NamedTuple):
    """The phonemes of one run of characters without white space, including its marks."""

    phonemes: str
    spoken: Span


@dataclass(frozen=True, slots=True)
class Phonemes:
    """A text's words in order, and its spans without sound."""

    words: tuple[PhonemeWord, ...]
    unspoken: tuple[Span, ...] = ()

    def __str__(self) -> str:
        return " ".join(word.phonemes for word in self.words)

    @property
    def is_silent(self) -> bool:
        """Whether there are only marks."""
        return all(symbol in MARKS for symbol in str(self).replace(" ", ""))


class _Piece(NamedTuple):
    """A word or a mark: letters where they are to be read, phonemes where they are given."""

    spoken: Span
    letters: str
    phonemes: str | None = None


class Phonemizer:
    """Reads text in English, as an American or a Briton, or in another language. Thread-safe.

    A language's tables (of English 0.3 s, some 60 MB) are loaded on first use; `warm` loads those
    of English ahead on another thread.
    """

    def __init__(self) -> None:
        self._readers: dict[Dialect, G2P] = {}
        self._lock = threading.Lock()
        self._read_cached = lru_cache(maxsize=CACHE_SIZE)(self._read)

    def warm(self, dialect: Dialect = "us") -> None:
        """Load a dialect of English in the background."""
        threading.Thread(
            target=self._reader, args=(dialect,), name="triptych-phonemes", daemon=True
        ).start()

    def __call__(self, spoken: SpokenText, reading: Reading = "us") -> Phonemes:
        """The phonemes of `spoken`, whose spans they refer to."""
        return self._read_cached(spoken.text, spoken.pronunciations, reading)

    def is_english(self, word: str, dialect: Dialect = "us") -> bool:
        """Whether a dictionary has a word in lower case, or the word it is derived from."""
        from hibari.g2p import Context

        phonemes, _ = self._reader(dialect).lexicon.get_word(word, "NN", None, Context())
        return phonemes is not None

    def _reader(self, dialect: Dialect) -> G2P:
        with self._lock:
            if dialect not in self._readers:
                self._readers[dialect] = _open_reader(is_british=dialect == "uk")
            return self._readers[dialect]

    def _read(
        self, text: str, pronunciations: tuple[Pronunciation, ...], reading: Reading
    ) -> Phonemes:
        if is_english(reading):
            pieces = list(_pieces(text, pronunciations, _english_pieces))
            return _join(text, pieces, _sounds(self._reader(reading), pieces))
        if table := tongue(reading).spelling:
            pieces = list(_pieces(text, pronunciations, _other_pieces))
            sounds = _spelled_sounds(_spelling_reader(reading), pieces)
        else:
            script = _script_reader(reading)
            pieces = list(_pieces(text, pronunciations, partial(_script_pieces, script)))
            sounds = [piece.phonemes or "" for piece in pieces]
        if table is None or not table.letters:
            sounds = self._with_english(pieces, sounds)
        chunks = None if table else _word_chunks(pieces)
        return _join(text, pieces, sounds, chunks)

    def _with_english(self, pieces: Sequence[_Piece], sounds: list[str]) -> list[str]:
        """`sounds`, with words in Latin letters read as English."""
        return [
            _sounds(self._reader("us"), [piece])[0]
            if not sound and piece.phonemes is None and piece.letters.isascii()
            else sound
            for piece, sound in zip(pieces, sounds, strict=True)
        ]


def _join(
    text: str,
    pieces: Sequence[_Piece],
    sounds: Sequence[str],
    chunks: Iterable[Span] | None = None,
) -> Phonemes:
    """The words of `text`: its chunks, by default those between white space, with their sounds."""
    words: list[PhonemeWord] = []
    parts, at = "", 0
    start: int | None = None
    for chunk in chunks or (Span(*match.span()) for match in _CHUNK.finditer(text)):
        start = chunk.start if start is None else start
        while at < len(pieces) and pieces[at].spoken.start < chunk.end:
            parts += sounds[at]
            at += 1
        if at and pieces[at - 1].spoken.end > chunk.end:
            continue  # given phonemes span several words
        if parts:
            words.append(PhonemeWord(parts.strip(), Span(start, chunk.end)))
        parts, start = "", None
    silent = (piece.spoken for piece, sound in zip(pieces, sounds, strict=True) if not sound)
    unspoken = (span for span in silent if any(map(str.isalpha, text[slice(*span)])))
    return Phonemes(tuple(words), tuple(unspoken))


def _open_reader(*, is_british: bool) -> G2P:
    from hibari.g2p import ASSETS, G2P  # its tables are megabytes

    @once
    def network() -> Any:
        from hibari.g2p.oov import OOV  # imports a runtime

        return OOV(str(Path(ASSETS) / ("oov_gb.onnx" if is_british else "oov.onnx")))

    def read(word: str) -> str | None:
        phonemes: str | None = network()(word)
        return phonemes

    return G2P(british=is_british, oov=read)


def _pieces(
    text: str,
    pronunciations: Sequence[Pronunciation],
    plain: Callable[[str, int, int], Iterator[_Piece]],
) -> Iterator[_Piece]:
    """Words and marks of `text` in order; a given pronunciation is attached to its word."""
    end = 0
    for given in pronunciations:
        yield from plain(text, end, given.spoken.start)
        yield _Piece(given.spoken, text[slice(*given.spoken)], given.phonemes)
        end = given.spoken.end
    yield from plain(text, end, len(text))


def _english_pieces(text: str, start: int, end: int) -> Iterator[_Piece]:
    previous = ""
    for match in _PIECE.finditer(text, start, end):
        piece, span = match[0], Span(*match.span())
        if piece[0].isalnum():
            letters = _readable(piece)
            is_spelled = letters == "A" and _is_among_letters(text, previous, match.end())
            yield _Piece(span, letters, _LETTER_A if is_spelled else None if letters else "")
            previous = piece
        else:
            yield _Piece(span, piece, _mark(text, match.start()))


def _is_among_letters(text: str, previous: str, end: int) -> bool:
    """Whether a capital A is spelled out, because it is next to another single capital."""
    following = _PIECE.search(text, end)
    return bool(
        _LETTER.match(previous)
        or (following and following[0] != "I" and _LETTER.match(following[0]))
    )


def _mark(text: str, at: int) -> str:
    """The prosodic mark of a character; empty for apostrophes and unknown signs."""
    if text[at] == '"':
        return _CLOSING if at and not text[at - 1].isspace() and text[at - 1] != "(" else _OPENING
    return _MARKS.get(text[at], "")


def _readable(word: str) -> str:
    """The letters of `word` that an English reader can pronounce; empty without any."""
    kept = "".join(map(_latin, unicodedata.normalize("NFC", word)))
    return kept if any(map(str.isalnum, kept)) else ""


def _latin(char: str) -> str:
    if char.isascii():
        return char
    if not unicodedata.name(char, "").startswith("LATIN"):
        return "'" if char == "’" else ""
    if ord(char) <= _PLAIN_LATIN_END:
        return char
    return unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()


def _sounds(reader: G2P, pieces: Sequence[_Piece]) -> list[str]:
    """The phonemes of each piece. A word's reading depends on its neighbours."""
    from hibari.g2p.token import Tok

    split: list[list[str]] = [
        [piece.letters] if piece.phonemes is not None else reader.tokenizer.split(piece.letters)
        for piece in pieces
    ]
    tags = iter(reader.tagger([part or "." for parts in split for part in parts]))
    tokens: list[Any] = []
    for piece, parts in zip(pieces, split, strict=True):
        tokens += [Tok(part, next(tags), phonemes=piece.phonemes) for part in parts]
        tokens[-1].whitespace = " "  # ends a piece, so that adjacent pieces are not joined
    sounds = [""]
    for token in reader.phonemize_tokens(tokens):
        sounds[-1] += token.phonemes or ""
        if token.whitespace:
            sounds.append("")
    assert len(sounds) == len(pieces) + 1, "one reading for each piece"
    return sounds[:-1]


# -- other languages -----------------------------------------------------------------------------


def _other_pieces(text: str, start: int, end: int) -> Iterator[_Piece]:
    for match in _PIECE.finditer(text, start, end):
        mark = None if match[0][0].isalnum() else _mark(text, match.start())
        yield _Piece(Span(*match.span()), match[0], mark)


def _script_pieces(reader: Reader, text: str, start: int, end: int) -> Iterator[_Piece]:
    """The words of a script without spaces, and other pieces between them."""
    at = start
    for word, phonemes in reader(text[start:end]):
        span = Span(start + word.start, start + word.end)
        yield from _other_pieces(text, at, span.start)
        yield _Piece(span, text[slice(*span)], phonemes)
        at = span.end
    yield from _other_pieces(text, at, end)


def _spelled_sounds(reader: SpellingReader, pieces: Sequence[_Piece]) -> list[str]:
    """The phonemes of each piece; words between two marks are read together."""
    sounds: list[str] = []
    clause: list[str] = []
    for piece in (*pieces, None):
        if piece is not None and piece.phonemes is None:
            clause.append(piece.letters)
            continue
        sounds += reader(clause)
        clause = []
        if piece is not None:
            sounds.append(piece.phonemes or "")
    return sounds


def _word_chunks(pieces: Sequence[_Piece]) -> Iterator[Span]:
    """Each word with the marks at its end, and those that open it."""
    start, end, has_word = 0, 0, False
    for piece in pieces:
        is_opening = piece.phonemes in ("(", _OPENING)
        is_word = piece.phonemes is None or not MARKS.issuperset(piece.phonemes.strip())
        if has_word and (is_opening or is_word):
            yield Span(start, end)
            start, has_word = piece.spoken.start, False
        end, has_word = piece.spoken.end, has_word or is_word
    if end > start:
        yield Span(start, end)


@lru_cache
def _spelling_reader(reading: Reading) -> SpellingReader:
    spelling = tongue(reading).spelling
    assert spelling is not None, "the language has rules"
    return SpellingReader(spelling)


@lru_cache
def _script_reader(reading: Reading) -> Reader:
    return OPENERS[reading]()

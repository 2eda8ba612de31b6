"""Readers of languages that need a library: which words a text has, and their phonemes.

Owns Mandarin, with misaki, and Japanese, with OpenJTalk, both extras of the package, and which
package a reader lacks. Knows no model; symbols are those of Kokoro's alphabet.
"""

# ruff: noqa: RUF001  # phonetic letters look like others
from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

from triptych.modalities.tts.api.text.spoken import Span
from triptych.modalities.tts.api.text.tongues import Reading

_HAN = re.compile("[\u4e00-\u9fff]+")
_JAPANESE = re.compile("[\u3005\u3040-\u30ff\u4e00-\u9fff\\d]+")
_OPENJTALK = threading.Lock()  # the library has one state for all
_NON_SYLLABIC = "\u032f"
_NASALS = (("m", "mpb"), ("ŋ", "kɡ"), ("ɲ", "ɲʨʥ"), ("n", "ntdɾzʣʦ"))


class Extra(NamedTuple):
    """The modules that a reading needs, and the extra of the package that brings them."""

    modules: tuple[str, ...]
    name: str


EXTRAS: Mapping[Reading, Extra] = {
    "ja": Extra(("pyopenjtalk",), "japanese"),
    "zh": Extra(("misaki", "jieba", "ordered_set", "pypinyin", "cn2an"), "mandarin"),
}


def missing_extra(reading: Reading) -> str | None:
    """The name of the extra that a reading needs and that is not installed."""
    extra = EXTRAS.get(reading)
    if extra is None or all(map(find_spec, extra.modules)):
        return None
    return extra.name


Reader: TypeAlias = Callable[[str], Iterator[tuple[Span, str]]]
"""Yields the words of a text that it reads, in order, with their phonemes. Thread-safe."""


def _open_mandarin() -> Reader:
    """Words as jieba cuts them, in IPA by their pinyin, with arrows for tones.

    A word with a character whose pinyin misaki cannot convert is read by character, without it.
    """
    import jieba
    from misaki.zh import ZHG2P

    jieba.setLogLevel("WARNING")
    tokenizer = jieba.Tokenizer()
    with TemporaryDirectory() as folder:  # its cache would lie where other users can write
        tokenizer.tmp_dir = folder
        tokenizer.initialize()

    def sounds(word: str) -> Iterator[tuple[str, str]]:
        try:
            yield word, ZHG2P.word2ipa(word).replace(_NON_SYLLABIC, "")
        except ValueError:
            if len(word) == 1:
                yield word, ""
                return
            for char in word:
                yield from sounds(char)

    def read(text: str) -> Iterator[tuple[Span, str]]:
        for run in _HAN.finditer(text):
            at = run.start()
            for part, sound in chain.from_iterable(map(sounds, tokenizer.lcut(run[0]))):
                if sound:
                    yield Span(at, at + len(part)), sound
                at += len(part)

    return read


def _open_japanese() -> Reader:
    """Words as OpenJTalk reads them, from kana. A run with numbers is one word.

    OpenJTalk writes numerals in other characters, so that its words have no place in the text.
    """
    import pyopenjtalk

    def read(text: str) -> Iterator[tuple[Span, str]]:
        for run in _JAPANESE.finditer(text):
            with _OPENJTALK:
                found: list[dict[str, str]] = pyopenjtalk.run_frontend(run[0])
            sounds = kana_sounds([word["pron"] for word in found])
            strings = [word["string"] for word in found]
            if "".join(strings) != run[0]:
                yield Span(*run.span()), " ".join(filter(None, sounds))
                continue
            at = run.start()
            for size, sound in _whole_words(zip(map(len, strings), sounds, strict=True)):
                yield Span(at, at + size), sound
                at += size

    return read


OPENERS: Mapping[Reading, Callable[[], Reader]] = {"ja": _open_japanese, "zh": _open_mandarin}


def _kana() -> dict[str, str]:
    """The sounds of a kana, or of one and the small vowel after it."""
    rows = {
        "アイウエオ": ("", "", "", "", ""),
        "カキクケコ": ("k", "kʲ", "k", "k", "k"),
        "ガギグゲゴ": ("ɡ", "ɡʲ", "ɡ", "ɡ", "ɡ"),
        "サシスセソ": ("s", "ɕ", "s", "s", "s"),
        "ザジズゼゾ": ("ʣ", "ʥ", "z", "ʣ", "ʣ"),
        "タチツテト": ("t", "ʨ", "ʦ", "t", "t"),
        "ダヂヅデド": ("d", "ʥ", "z", "d", "d"),
        "ナニヌネノ": ("n", "ɲ", "n", "n", "n"),
        "ハヒフヘホ": ("h", "ç", "ɸ", "h", "h"),
        "バビブベボ": ("b", "bʲ", "b", "b", "b"),
        "パピプペポ": ("p", "pʲ", "p", "p", "p"),
        "マミムメモ": ("m", "mʲ", "m", "m", "m"),
        "ラリルレロ": ("ɾ", "ɾʲ", "ɾ", "ɾ", "ɾ"),
    }
    sounds: dict[str, str] = {}
    for row, onsets in rows.items():
        for kana, onset, vowel in zip(row, onsets, "aiɯeo", strict=True):
            is_central = vowel == "ɯ" and kana in "スズツヅ"
            sounds[kana] = onset + ("ɨ" if is_central else vowel)
            bare = onset or {"ウ": "β", "イ": "j"}.get(kana, "")
            for small, glide in zip("ァィゥェォャュョ", "aiɯeoaɨo", strict=True):
                palatal = "ʲ" if small in "ィャュョ" and bare in ("t", "d", "ɸ", "ʦ") else ""
                sounds[kana + small] = f"{bare}{palatal}{glide}"
    glides = ("ja", "jɯ", "jo", "βa", "i", "e", "o", "vɯ")
    plain = dict(zip("ヤユヨワヰヱヲヴ", glides, strict=True))
    voiced = {f"ヴ{small}": f"v{vowel}" for small, vowel in zip("ァィェォ", "aieo", strict=True)}
    return {**sounds, **plain, **voiced, "ー": "ː", "ッ": "ʔ", "ン": "ɴ"}


_KANA = _kana()


def _whole_words(words: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Sizes and sounds of words, joined where one ends in a stop or begins with length."""
    size, sound = 0, ""
    for more, following in words:
        if size and not (sound.endswith("ʔ") or following.startswith("ː")):
            yield size, sound
            size, sound = 0, ""
        size, sound = size + more, sound + following
    yield size, sound


def kana_sounds(words: Sequence[str]) -> list[str]:
    """The phonemes of words in katakana; anything else is left out.

    A nasal takes the place of the consonant after it, also in the next word.
    """
    sounds: list[str] = []
    for kana in words:
        sound, at = "", 0
        while at < len(kana):
            size = 2 if at + 1 < len(kana) and kana[at : at + 2] in _KANA else 1
            sound += _KANA.get(kana[at : at + size], "")
            at += size
        sounds.append(sound)
    joined = " ".join(sounds)
    for place, following in _NASALS:
        joined = re.sub(f"ɴ(?= ?[{following}])", place, joined)
    return joined.split(" ")

"""Which reading a text shows by itself, for models that find its language by themselves.

Owns the evidence of scripts; `foreign` has that of words. Knows no model.
"""

from __future__ import annotations

import re
import unicodedata

from triptych.modalities.tts.api.text.foreign import is_english_text
from triptych.modalities.tts.api.text.tongues import Reading

_KANA = re.compile("[\u3041-\u3096\u30a1-\u30fa]")
_CHARACTERS = "\u3005\u3041-\u30ff\u3400-\u9fff"  # about a word each
_CHARACTER = re.compile(f"[{_CHARACTERS}]")
_WORD = re.compile(rf"[^\W\d_{_CHARACTERS}]+")


def reading_by_text(text: str) -> Reading | None:
    """Chinese or Japanese by the script, English by its words; `None` for any other text.

    A text in several scripts is in that of most of its words; one with Hangul is in neither.
    """
    words = _WORD.findall(text)
    scripts = {unicodedata.name(word[0], "").partition(" ")[0] for word in words}
    if "HANGUL" in scripts:
        return None
    if len(characters := _CHARACTER.findall(text)) >= max(1, len(words)):
        return "ja" if _KANA.search(text) else "zh"
    is_latin = not characters and scripts <= {"LATIN"}
    return "us" if is_latin and is_english_text(text) else None

"""The languages that Whisper supports, by Whisper's codes.

Owns the names that a caller may use, and which languages are written without spaces. Knows no
model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

LANGUAGES: Mapping[str, str] = MappingProxyType({
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian",
    "ko": "korean", "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish",
    "pl": "polish", "ca": "catalan", "nl": "dutch", "ar": "arabic", "sv": "swedish",
    "it": "italian", "id": "indonesian", "hi": "hindi", "fi": "finnish", "vi": "vietnamese",
    "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay", "cs": "czech",
    "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian",
    "la": "latin", "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu",
    "fa": "persian", "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani",
    "sl": "slovenian", "kn": "kannada", "et": "estonian", "mk": "macedonian", "br": "breton",
    "eu": "basque", "is": "icelandic", "hy": "armenian", "ne": "nepali", "mn": "mongolian",
    "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili", "gl": "galician",
    "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona",
    "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan", "ka": "georgian",
    "be": "belarusian", "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic",
    "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese", "ht": "haitian creole",
    "ps": "pashto", "tk": "turkmen", "nn": "nynorsk", "mt": "maltese", "sa": "sanskrit",
    "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog", "mg": "malagasy",
    "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa",
    "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
})  # fmt: skip
"""English names by code: ISO 639-1 where there is one."""

_TAG = re.compile(r"(?<=^[a-z]{2})[-_][a-z0-9_-]+$|(?<=^[a-z]{3})[-_][a-z0-9_-]+$")
"""The part of a locale tag after the language: script, region, variant."""

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages without spaces between words: each character counts as a word."""


_UNSPACED_LETTERS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"
)
"""Thai and Lao, Burmese, Khmer, kana, Chinese characters."""


def begins_unspaced(text: str) -> bool:
    """Whether a text begins with a letter of a script without spaces between words."""
    return _UNSPACED_LETTERS.match(text) is not None


def language_code(language: str) -> str:
    """The code of a language by code, locale (`en-US`) or English name; empty if unknown."""
    wanted = language.strip().lower()
    code = _TAG.sub("", wanted)
    if code in LANGUAGES:
        return code
    return next((code for code, name in LANGUAGES.items() if name == wanted), "")

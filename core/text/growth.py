"""Bounds on how much a tokenizer may lengthen a text, checked before any text is tokenized.

Owns the growth factor of each step in a tokenizer.json. Files are untrusted: four consecutive
replacements of one letter by a thousand turn a word into a terabyte. Knows the settings of the
`tokenizers` library, and no model.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers

from triptych.core.errors import WeightsError

MAX_GROWTH = 512
"""The largest permitted factor on the bytes of a text. Published tokenizers stay below 300 by this
estimate, which takes the worst case of each step, and below 20 on real texts."""
MAX_ADDED = 4096
"""The most special tokens added to a text."""

_GROWTH: Mapping[str, int] = MappingProxyType(
    {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "BertNormalizer": 3, "Lowercase": 2}
    | {"ByteLevel": 2, "Metaspace": 3}
)
"""The factor of each step on bytes: Unicode normalization,
https://unicode.org/faq/normalization.html; letters for bytes, and a three-byte mark for a space."""
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_LOOKS_AROUND = re.compile(r"\(\?|\\[bBGKyY]")
"""Syntax of patterns whose matches may be empty only in some texts."""
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


def steps_of(part: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer, pre-tokenizer, post-processor or decoder, step by step."""
    if part is None:
        return []
    found: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    while waiting:
        settings = waiting.pop()
        if settings["type"] == "Sequence":
            (inner,) = (settings[name] for name in _LISTS if name in settings)
            waiting += reversed(inner)
        else:
            found.append(settings)
    return found


def check_growth(tokenizer: Tokenizer) -> None:
    """Raise `WeightsError`, naming the part at fault, if texts or answers may grow too long."""
    normalized = growth_of(tokenizer.normalizer)
    growths = {
        "normalizer": normalized,
        "pre_tokenizer": normalized * growth_of(tokenizer.pre_tokenizer),
        "post_processor": growth_of(tokenizer.post_processor),
        "decoder": growth_of(tokenizer.decoder),
    }
    for name, growth in growths.items():
        if growth > MAX_GROWTH:
            raise WeightsError(
                f"its {name} may make {growth:.3g} bytes of one; at most {MAX_GROWTH} are allowed"
            )
    num_added = tokenizer.num_special_tokens_to_add(is_pair=False)
    if num_added > MAX_ADDED:
        raise WeightsError(
            f"its post_processor adds {num_added} tokens to every text; at most {MAX_ADDED} are"
            " allowed"
        )


def growth_of(part: Any) -> int:
    """The largest factor of a tokenizer's part, as passed to `steps_of`, on a text's bytes."""
    bytes_of, form = _Bytes(), 1
    for step in reversed(steps_of(part)):
        literal = step["type"] == "Replace" and step["pattern"].get("String")
        if literal:
            bytes_of.replace(literal, step["content"])
        elif step["type"] in _FORMS:  # consecutive forms grow no more than the largest alone
            form = max(form, _step_growth(step))
            bytes_of.mix(1)
        else:
            bytes_of.mix(_step_growth(step))
    return math.ceil(form * bytes_of.worst)


class _Bytes:
    """The most output bytes of each character; steps are added from the last to the first.

    Separate steps that each surround one punctuation mark do not multiply; a replacement that
    contains a letter which a later step replaces does.
    """

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._of_others = 1.0

    @property
    def worst(self) -> float:
        """The most output bytes per input byte."""
        per_byte = (most / len(char.encode()) for char, most in self._of.items())
        return max([self._of_others, *per_byte])

    def replace(self, literal: str, content: str) -> None:
        """Add a step that replaces `literal` by `content`."""
        per_byte = sum(map(self._most, content)) / len(literal.encode())
        for char in set(literal):
            most = per_byte * len(char.encode())
            self._of[char] = most if literal == char else max(most, self._most(char))

    def mix(self, growth: float) -> None:
        """Add a step that may change any character, to at most `growth` times as many bytes."""
        self._of_others, self._of = growth * self.worst, {}

    def _most(self, char: str) -> float:
        return self._of.get(char, self._of_others * len(char.encode()))


def _step_growth(step: Mapping[str, Any]) -> int:
    kind = step["type"]
    if kind == "Replace":
        return _replaced(step["pattern"].get("Regex", ""), len(step["content"].encode()))
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())
    if kind == "Precompiled":
        return _longest_piece(step["precompiled_charsmap"])
    if kind == "TemplateProcessing":
        return max(1, sum("Sequence" in piece for piece in step["single"]))
    return _GROWTH.get(kind, 1)


def _replaced(regex: str, num_bytes: int) -> int:
    """The growth of a text if `num_bytes` replace each match of `regex`."""
    probe = normalizers.Replace(Regex(regex), "x")
    # An empty match occurs before, between and after all bytes, which are kept.
    is_empty = len(probe.normalize_str("\x01")) > 1 or _LOOKS_AROUND.search(regex) is not None
    return 1 + 2 * num_bytes if is_empty else max(1, num_bytes)


def _longest_piece(charsmap: str | None) -> int:
    """The longest replacement string in SentencePiece's character map.

    The strings, each ended by a zero, follow a trie, which is preceded by its length in bytes.
    """
    try:
        raw = base64.b64decode(charsmap or "")
    except binascii.Error as error:
        raise WeightsError("its precompiled_charsmap is damaged") from error
    trie_bytes = int.from_bytes(raw[:4], "little")
    return max(map(len, raw[4 + trie_bytes :].split(b"\0")), default=0) or 1

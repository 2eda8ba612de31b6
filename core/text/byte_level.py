"""The letters that represent bytes in byte-level vocabularies.

Owns the table (Radford et al. 2019, `encoder.py` of GPT-2).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _letters() -> dict[int, str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + n) for n in range(256))
    return {byte: chr(byte) if byte in printable else next(others) for byte in range(256)}


LETTERS: Mapping[int, str] = MappingProxyType(_letters())
"""The printable letter of each byte."""
BYTES: Mapping[str, int] = MappingProxyType({letter: byte for byte, letter in LETTERS.items()})
"""The byte of each letter."""


def spell(data: bytes) -> str:
    """The letters of `data` in a byte-level vocabulary."""
    return "".join(map(LETTERS.__getitem__, data))


def unspell(token: str) -> bytes:
    """The bytes of a vocabulary's token; letters that represent no byte are dropped."""
    return bytes(BYTES[letter] for letter in token if letter in BYTES)

"""The bytes that each token of a tokenizer represents.

Owns the ways in which vocabularies represent bytes. Knows no model and no text.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer

from triptych.core.text.byte_level import unspell

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NUM_CACHED = 2**14
"""Tokens whose bytes are cached: likely tokens recur among alternatives."""


class TokenBytes:
    """The bytes of one tokenizer's tokens, which may be part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        decoder = tokenizer.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._cached = lru_cache(_NUM_CACHED)(self._read)

    def __call__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an unknown id."""
        return self._cached(token_id)

    def _read(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return str(added.content).encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return unspell(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special: no text encodes to it, and answers omit it."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

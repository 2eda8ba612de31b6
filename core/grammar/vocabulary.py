"""A model's tokens as llguidance, the grammar library, needs them.

Owns the bytes of each token (special tokens have none), the extra token that ends a text, and the
tokenization of text that a grammar forces: by the model's tokenizer if it keeps texts exactly
(`is_canonical`), otherwise by the library. Owns the form of token masks (a bit per token, in 32-bit
words, lowest bit first) and the mask of text tokens. Knows no grammar, no row and no stop token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Self

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer

from triptych.core.text.token_bytes import TokenBytes
from triptych.core.text.tokenizer import encode, literal_copy, read_tokenizer

Words = NDArray[np.uint32]

_LEADS: Final = ("", "\n", "a\n")
"""Prefixes to tokenize a text after, so that the tokenizer inserts no space before it."""
_MAX_FORCED_BYTES: Final = 1024
_UNSURE_TOKENS: Final = 8
"""Tokens at the end of a text that may change if the text continues."""
_PROBES: Final = ('{"name": "', "red", "ab c\n")


class GrammarVocabulary:
    """The vocabulary of a model with `vocab_size` logits and the tokens of `tokenizer`.

    `is_canonical`: texts can be tokenized piece by piece, so that forced tokens are those that the
    tokenizer would choose.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = literal_copy(tokenizer)
        self._bytes = TokenBytes(tokenizer)
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.no_tokens = bytes(4 * self.num_words)
        tokens = [self._text(token_id) for token_id in range(vocab_size)]
        self.text_words = self.bits(n for n, text in enumerate(tokens) if text)
        self._lead = next((lead for lead in _LEADS if self._keeps_texts(lead)), None)
        self.is_canonical = self._lead is not None
        # The end of a text is a separate token after all others: each row has its own stop tokens.
        texts = _Texts([*tokens, b"\xff<end>"])
        self.num_library_words = -(-len(texts.tokens) // 32)
        self.library = LLTokenizer(TokenizerWrapper(texts))
        texts.tokenize = self.tokenize if self.is_canonical else self.library.greedy_tokenize

    @classmethod
    def open(cls, folder: Path, name: str, vocab_size: int) -> Self:
        """The vocabulary of a model's folder. Raises `WeightsError`."""
        return cls(read_tokenizer(folder, name), vocab_size)

    def bits(self, token_ids: Iterable[int]) -> Words:
        """A mask with only `token_ids` set."""
        wanted = np.zeros(self.num_words * 32, np.uint8)
        wanted[list(token_ids)] = 1
        return np.packbits(wanted, bitorder="little").view("<u4")

    def tokenize(self, text: str) -> list[int]:
        """The tokens of `text` within a longer text."""
        assert self._lead is not None, "a tokenizer that keeps texts"
        return self._behind(self._lead, text)

    def _text(self, token_id: int) -> bytes:
        return b"" if self._bytes.is_special(token_id) else self._bytes(token_id)

    def _behind(self, lead: str, text: str) -> list[int]:
        (encoding,) = encode(self._tokenizer, [lead + text], add_special_tokens=False)
        if not lead:
            return list(encoding.ids)
        (before,) = encode(self._tokenizer, [lead], add_special_tokens=False)
        return list(encoding.ids[len(before.ids) :])

    def _keeps_texts(self, lead: str) -> bool:
        """Whether texts after `lead` are tokenized to exactly their bytes."""
        return all(
            b"".join(map(self._bytes, self._behind(lead, probe))) == probe.encode()
            for probe in _PROBES
        )


class _Texts:
    """The tokenizer interface of the grammar library."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]
        self.tokenize: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: bytes) -> list[int]:
        if len(text) <= _MAX_FORCED_BYTES:
            return self.tokenize(text.decode("utf-8", "replace"))
        # A pattern may force a million characters. Later ones are computed when needed.
        begun = self.tokenize(text[:_MAX_FORCED_BYTES].decode("utf-8", "ignore"))
        return begun[:-_UNSURE_TOKENS] or begun

"""Byte-level vocabularies given as ranked tokens, as tiktoken and Mistral's tekken publish them.

Owns making their merges, and reading `tekken.json`. Knows no model.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert
from triptych.core.text.byte_level import spell

TEKKEN_FILE = "tekken.json"
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def ranked_bpe(
    by_token: Mapping[bytes, int],
    specials: Mapping[str, int] = NO_TOKENS,
    *,
    ignore_merges: bool = False,
) -> BPE:
    """Byte pairs that merge in the order of the ranks, and `specials` that never do.

    Every pair of tokens that joins to a token becomes a merge with that token's rank.
    """
    merges = [
        (spell(token[:cut]), spell(token[cut:]))
        for token in sorted(by_token, key=by_token.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in by_token and token[cut:] in by_token
    ]
    vocabulary = {spell(token): rank for token, rank in by_token.items()}
    return BPE(vocab=vocabulary | dict(specials), merges=merges, ignore_merges=ignore_merges)


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    """The fields of tekken.json that are read."""

    config: _TekkenConfig
    vocab: list[_Token]
    special_tokens: list[_Special]


def read_tekken(file: Path) -> Tokenizer:
    """The tokenizer in a `tekken.json`, where special tokens come first. Raises `WeightsError`."""
    try:
        found = convert(json.loads(file.read_bytes()), _Tekken)
        first = found.config.default_num_special_tokens
        words = found.vocab[: found.config.default_vocab_size - first]
        by_token = {base64.b64decode(word.token_bytes): word.rank + first for word in words}
    except (ValueError, binascii.Error, msgspec.ValidationError) as error:
        raise WeightsError(f"{TEKKEN_FILE} cannot be read.") from error
    named = {token.rank: token.token_str for token in found.special_tokens}
    specials = {named.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(first)}
    tokenizer = Tokenizer(ranked_bpe(by_token, specials, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(found.config.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

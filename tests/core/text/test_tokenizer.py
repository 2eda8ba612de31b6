"""The fewest tokens a text can have, and tokenizers that cannot be read."""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.text_models import byte_tokenizer
from triptych.core.errors import WeightsError
from triptych.core.text import tokenizer as reading
from triptych.core.text.tokenizer import MinTokens, decode, encode, read_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**parts: Any) -> Tokenizer:
    """Bytes, and pieces of two and four of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*alphabet, "aa", "aaaa", "ab", "ĠĠ"])}
    merges = [("a", "a"), ("aa", "aa"), ("a", "b"), ("Ġ", "Ġ")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def sentence_piece() -> Tokenizer:
    """As Llama 2 and Mistral have it: bytes where the vocabulary lacks a character."""
    vocab = {token: n for n, token in enumerate([*BYTES, "▁", "a", "b", "▁a", "aa", "▁aa"])}
    merges = [("▁", "a"), ("a", "a"), ("▁a", "a")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def sparse() -> Tokenizer:
    """Without a letter for some bytes, which then vanish."""
    vocab = {letter: n for n, letter in enumerate("abcdĠ")}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def stripping() -> Tokenizer:
    """With a token that takes the white space around it."""
    made = byte_level()
    made.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return made


def composing() -> Tokenizer:
    return byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    )


KNOWN = (byte_level, byte_tokenizer, sentence_piece, sparse, stripping, composing)
TEXTS = st.text(
    st.sampled_from("aaaab \n\t<\u00e9\u0301\u1100\u1161\u11a8\uff21\u212a🙂\x04\u3000")
)


@pytest.mark.parametrize("make", KNOWN)
@settings(deadline=None)
@given(text=st.one_of(TEXTS, TEXTS.map(lambda text: f"  {text} <mask>   "), st.text()))
def test_no_text_has_fewer_tokens_than_its_bound(make: Any, text: str) -> None:
    made = make()
    (encoding,) = encode(made, [text], add_special_tokens=False)
    assert MinTokens.of(made)(text) <= len(encoding)


@pytest.mark.parametrize(
    ("make", "text", "least"),
    [
        (byte_level, "a" * 4000, 1000),
        (sentence_piece, "a" * 6000, 1000),
        (byte_tokenizer, "a" * 1300, 100),  # its special tokens are of 13 letters
        (sparse, "\x04" * 1000, 0),
        (stripping, " " * 1000, 0),
        (stripping, "a" * 600, 100),
    ],
)
def test_the_bound_is_the_text_by_the_longest_token(make: Any, text: str, least: int) -> None:
    assert MinTokens.of(make())(text) == least


@pytest.mark.parametrize(
    "made",
    [
        Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
        Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
        byte_level(pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )),
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.StripAccents()),
        byte_level(normalizer=normalizers.Replace("a", "")),
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    ],
)  # fmt: skip
def test_a_tokenizer_that_may_swallow_any_text_has_no_bound(made: Tokenizer) -> None:
    assert MinTokens.of(made).bytes_per_token == math.inf
    assert MinTokens.of(made)("a" * 10**6) == 0


def test_no_normal_form_shrinks_a_character_by_more_than_is_reckoned_with() -> None:
    for form in ("NFD", "NFKD"):
        most = max(
            len(char.encode()) / len(unicodedata.normalize(form, char).encode())
            for char in map(chr, range(0x110000))
            if not 0xD800 <= ord(char) < 0xE000
        )
        assert most <= reading._SHRINKAGE[form]
    composed = max(
        len(unicodedata.normalize("NFD", char).encode()) / len(char.encode())
        for char in map(chr, range(0x110000))
        if not 0xD800 <= ord(char) < 0xE000 and unicodedata.is_normalized("NFC", char)
    )
    assert reading._SHRINKAGE["NFC"] >= reading._SHRINKAGE["NFD"] * composed
    assert reading._SHRINKAGE["NFKC"] >= reading._SHRINKAGE["NFKD"] * composed


def test_ids_are_those_of_the_library() -> None:
    made = byte_level()
    text = "aaaa ab\u00e9 aab"
    (encoding,) = encode(made, [text])
    assert encoding.ids == made.encode(text).ids
    assert decode(made, encoding.ids) == text


def test_truncation_and_padding_of_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    (encoding,) = encode(read_tokenizer(tmp_path, "m"), ["bbbbb"])
    assert len(encoding.ids) == 5


@pytest.mark.parametrize(
    "damage", ["", "{}", "[]", "{", json.dumps({"model": 5}), byte_level().to_str()[:2000]]
)
def test_a_damaged_tokenizer_is_named_in_one_line(tmp_path: Path, damage: str) -> None:
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(WeightsError, match=r"^m: tokenizer\.json cannot be read \(.+\)\.$"):
        read_tokenizer(tmp_path, "m")

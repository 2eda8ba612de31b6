"""How much longer a tokenizer may make a text, and that more than that is refused in one line."""

from __future__ import annotations

import base64
import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from triptych.core.errors import WeightsError
from triptych.core.text.growth import MAX_ADDED, check_growth, growth_of
from triptych.core.text.tokenizer import read_tokenizer


def with_parts(**parts: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], unk_token="a"))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def precompiled(*pieces: str) -> normalizers.Normalizer:
    """SentencePiece's table with an empty trie."""
    raw = (4).to_bytes(4, "little") + bytes(4) + b"".join(p.encode() + b"\0" for p in pieces)
    return normalizers.Precompiled(raw)


EXPLOSIVE = {
    "a pattern, four times": {
        "normalizer": normalizers.Sequence([normalizers.Replace(Regex("."), "x" * 1000)] * 4)
    },
    "a letter": {"normalizer": normalizers.Replace("a", "b" * 600)},
    "nested": {
        "normalizer": normalizers.Sequence(
            [normalizers.Sequence([normalizers.Replace("a", "a" * 20)] * 2)] * 2
        )
    },
    "a prefix": {"normalizer": normalizers.Prepend("x" * 1000)},
    "nothing": {"normalizer": normalizers.Replace("", "x" * 1000)},
    "bytes of bytes": {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 20)
    },
    "two parts together": {
        "normalizer": normalizers.Replace("a", "b" * 300),
        "pre_tokenizer": pre_tokenizers.ByteLevel(),
    },
    "a table": {"normalizer": precompiled("x" * 1000)},
    "answers": {"decoder": decoders.Sequence([decoders.Replace("a", "a" * 100)] * 3)},
    "the text again": {
        "post_processor": processors.TemplateProcessing(
            single=" ".join(["$A"] * 600), special_tokens=[]
        )
    },
    "marks": {
        "post_processor": processors.TemplateProcessing(
            single=" ".join(["a"] * (MAX_ADDED + 1) + ["$A"]), special_tokens=[("a", 0)]
        )
    },
}
PLAIN = {
    "llama": {
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        ),
        "decoder": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
    },
    "t5": {
        "normalizer": normalizers.Sequence(
            [precompiled("x" * 33), normalizers.Replace(Regex(" {2,}"), "▁")]
        ),
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first"),
    },
    "xlnet": {
        "normalizer": normalizers.Sequence(
            [
                normalizers.Replace("``", '"'),
                normalizers.NFKD(),
                normalizers.StripAccents(),
                normalizers.NFKC(),
                normalizers.Lowercase(),
            ]
        )
    },
    "spaces around punctuation": {
        "normalizer": normalizers.Sequence(
            [
                normalizers.BertNormalizer(),
                *(normalizers.Replace(char, f" {char} ") for char in string.punctuation),
                normalizers.Replace(Regex(r"\s+"), " "),
            ]
        )
    },
    "bert": {
        "normalizer": normalizers.BertNormalizer(),
        "post_processor": processors.BertProcessing(("a", 0), ("a", 0)),
    },
    "qwen": {"normalizer": normalizers.NFC(), "pre_tokenizer": pre_tokenizers.ByteLevel()},
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_tokenizer_that_explodes_is_refused_before_it_tokenizes(
    name: str, tmp_path: Path
) -> None:
    parts = EXPLOSIVE[name]
    (tmp_path / "tokenizer.json").write_text(with_parts(**parts).to_str())
    with pytest.raises(WeightsError) as caught:
        read_tokenizer(tmp_path, "tiny")
    message = caught.value.message
    assert message.startswith("tiny: tokenizer.json is not usable: its ")
    assert any(part in message for part in parts)
    assert "\n" not in message


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_published_is_read(name: str) -> None:
    check_growth(with_parts(**PLAIN[name]))


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    settings_of = json.loads(with_parts(normalizer=precompiled("x")).to_str())
    settings_of["normalizer"]["precompiled_charsmap"] = base64.b64encode(b"\1").decode()
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings_of))
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path, "tiny")


REPLACED = st.text("ab▁", max_size=3)
PATTERNS = st.sampled_from((Regex("."), Regex("a+"), Regex("[^b]"), "a", "b", "ab", "bb", "▁", " "))
STEPS = st.one_of(
    st.builds(normalizers.Replace, PATTERNS, REPLACED),
    st.builds(normalizers.Prepend, st.text("ab▁", min_size=1, max_size=3)),
    st.sampled_from(
        (
            *(normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD()),
            *(normalizers.Lowercase(), normalizers.BertNormalizer(), normalizers.ByteLevel()),
        )
    ),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=4), st.text("ab ﷺ㌀\u0390\u1f82éİ日", min_size=1, max_size=8))
def test_no_text_grows_by_more_than_is_computed(
    steps: list[normalizers.Normalizer], text: str
) -> None:
    normalizer = normalizers.Sequence(steps)
    grown = len(normalizer.normalize_str(text).encode())
    assert grown <= growth_of(normalizer) * len(text.encode())


@pytest.mark.parametrize("pattern", ["", Regex("a*"), Regex("(?=b)"), Regex(r"\b")])
@pytest.mark.parametrize("text", ["a", "b", "ab", "ba b"])
def test_what_matches_between_letters_is_counted_so(pattern: Any, text: str) -> None:
    normalizer = normalizers.Replace(pattern, "xyz")
    assert len(normalizer.normalize_str(text)) <= growth_of(normalizer) * len(text)

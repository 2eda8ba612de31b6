"""Vocabularies of ranked tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from triptych.core.errors import WeightsError
from triptych.core.text.byte_pairs import TEKKEN_FILE
from triptych.core.text.tokenizer import encode, read_tokenizer

WORDS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"\xc3\xa9"]


def write_tekken(folder: Path, *, num_words: int) -> None:
    words = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode()}
        for rank, word in enumerate(WORDS)
    ]
    content = {
        "config": {
            "pattern": r" ?\p{L}+|\s+|.",
            "default_vocab_size": 10 + num_words,
            "default_num_special_tokens": 10,
        },
        "vocab": words,
        "special_tokens": [{"rank": 1, "token_str": "<s>"}, {"rank": 3, "token_str": "[INST]"}],
    }
    (folder / TEKKEN_FILE).write_text(json.dumps(content))


def test_tekken_is_read_where_there_is_no_other_tokenizer(tmp_path: Path) -> None:
    write_tekken(tmp_path, num_words=len(WORDS))
    tokenizer = read_tokenizer(tmp_path, "m")
    (found,) = encode(tokenizer, ["<s>[INST]the the \u00e9"], add_special_tokens=False)
    first = 10  # special tokens come before the words
    assert found.ids == [1, 3, first + 257, first + 258, first + 32, first + 259]
    assert tokenizer.decode(found.ids) == "the the \u00e9"
    assert tokenizer.get_vocab_size() == first + len(WORDS)


def test_words_beyond_the_stated_size_are_left_out(tmp_path: Path) -> None:
    write_tekken(tmp_path, num_words=257)
    (found,) = encode(read_tokenizer(tmp_path, "m"), ["the"], add_special_tokens=False)
    assert found.ids == [10 + 256, 10 + ord("e")]


def test_a_damaged_tekken_is_refused(tmp_path: Path) -> None:
    (tmp_path / TEKKEN_FILE).write_text("{}")
    with pytest.raises(WeightsError, match=r"tekken\.json is not usable"):
        read_tokenizer(tmp_path, "m")

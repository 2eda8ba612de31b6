"""Qwen2's tokenizer from `vocab.json` and `merges.txt`, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from triptych.core.errors import WeightsError
from triptych.core.text.tokenizer import read_tokenizer

BYTES = "".join(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)]))
MERGES = ("h e", "l l", "he ll", "Ġ Ġ", "1 2", "Ċ Ċ", "Ã ©")
SPECIAL = ("<|endoftext|>", "<|im_start|>")


def write(folder: Path, **changes: Any) -> None:
    merged = [merge.replace(" ", "") for merge in MERGES]
    controls = [chr(256 + index) for index in range(68)]  # the bytes that have no letter
    vocab = {token: index for index, token in enumerate((*BYTES, *controls, *merged))}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {
        str(len(vocab) + index): {"content": content, "special": True, **flags}
        for index, content in enumerate(SPECIAL)
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "unk_token": None,
        **changes,
    }
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(("#version: 0.2", *MERGES)))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "text",
    ["hello  hello", "it's 1212 é\n\nI'LL\t x", "<|im_start|>user\nhell", "e\u0301 — 你好! ?", ""],
)
def test_ids_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert read_tokenizer(tmp_path, "q").encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "for Qwen2 tokenizers only"),
        ({"added_tokens_decoder": {"9": {"content": "<x>", "special": True}}}, "vocab.json"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(WeightsError, match=message):
        read_tokenizer(tmp_path, "q")

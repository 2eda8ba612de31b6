"""Tokenizers out of GGUF metadata, against transformers' reading and the families' own rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from support.weight_files import byte_tokens, write_gguf
from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

TEXTS = (
    "the thing, in  the end",
    "  two\n\n\tspaced naïve 日本 🤖 don't I'LL",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\r\n    return x+1\r\n",
    "",
    " ",
    "مرحبا ñ \u200d",
)
SPLIT_TEXT = "Ab's 1234 e\u0301a.\n\n \u4e2d\u6587"
SPM_TOKENS = (
    ["<unk>", "<s>", "</s>"]
    + [f"<0x{byte:02X}>" for byte in range(256)]
    + ["▁", "t", "h", "e", "a", "▁t", "he", "▁the", "▁a", "th", "▁th"]
)
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.scores": [float(-i) for i in range(len(SPM_TOKENS))],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(SPM_TOKENS) - 259)],
    "tokenizer.ggml.unknown_token_id": 0,
}


def convert(folder: Path, **metadata: Any) -> Path:
    keys = {key if "." in key else f"tokenizer.ggml.{key}": v for key, v in metadata.items()}
    file = write_gguf(folder / "tiny.gguf", metadata=keys, kind=Kind.F16)
    target = folder / "tiny"
    target.mkdir(exist_ok=True)
    convert_gguf(file, target, SilentProgress())
    return target


def tokenizer(folder: Path, **metadata: Any) -> Tokenizer:
    return Tokenizer.from_file(str(convert(folder, **metadata) / "tokenizer.json"))


def pieces(folder: Path, text: str, **metadata: Any) -> list[str]:
    encoding = tokenizer(folder, **metadata).encode(text)
    return list(encoding.tokens)


@pytest.mark.parametrize("pre", ["default", "qwen2", "llama-bpe", "tekken", "smollm"])
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_byte_level_agrees_with_transformers(pre: str, tmp_path: Path) -> None:
    target = convert(tmp_path, pre=pre, add_bos_token=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ours = AutoTokenizer.from_pretrained(target)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == text
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert ours.chat_template == theirs.chat_template


def test_every_byte_comes_back(tmp_path: Path) -> None:
    text = "".join(map(chr, range(1, 0x250))) + "".join(map(chr, range(0x1F600, 0x1F650)))
    for pre in ("default", "smollm", "llama-bpe", "tekken"):
        ours = tokenizer(tmp_path, pre=pre, add_bos_token=False)
        assert ours.decode(ours.encode(text).ids) == text


def test_smollm_cuts_digits_before_words(tmp_path: Path) -> None:
    """transformers keeps spaces with the digit behind them; the family's own tokenizer does not."""
    assert pieces(tmp_path, "a  12", pre="smollm") == ["a", "ĠĠ", "1", "2"]
    assert pieces(tmp_path, "a  12", pre="gpt-2") == ["a", "Ġ", "Ġ", "12"]


def test_llama3_takes_whole_words_first_and_begins_with_bos(tmp_path: Path) -> None:
    """ "Ġthe" without the merge that makes it is found only by looking up the whole word."""
    merges = ["Ġ t", "h e"]
    assert pieces(tmp_path, "x the", pre="gpt-2", merges=merges) == ["x", "Ġt", "he"]
    assert pieces(tmp_path, "x the", pre="llama-bpe", merges=merges) == [
        "<|im_start|>", "x", "Ġthe",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "Ab|'s| 1234| e|\u0301|a|.|\n\n| \u4e2d\u6587"),
        ("exaone", "Ab|'s| |1|2|3|4| e|\u0301|a|.|\n\n| \u4e2d\u6587"),
        ("dbrx", "Ab|'s| |123|4| e|\u0301a|.\n\n| \u4e2d\u6587"),
        ("qwen35", "Ab|'s| |1|2|3|4| e\u0301a|.\n\n| \u4e2d\u6587"),
        ("seed-coder", "Ab|'s| |1|2|3|4| e|\u0301a|.|\n\n| \u4e2d\u6587"),
        ("gpt-4o", "Ab's| |123|4| e\u0301a|.\n\n| \u4e2d\u6587"),
        ("kimi-k2", "Ab's| |123|4| e\u0301a|.\n\n| |\u4e2d\u6587"),
        ("deepseek-v3", "Ab|'s| |123|4| e\u0301a|.\n\n| |\u4e2d\u6587"),
        ("deepseek-llm", "Ab|'|s| |1234| e|\u0301|a|.|\n|\n| |\u4e2d\u6587"),
        ("deepseek-coder", "Ab|'|s| |1|2|3|4| e|\u0301|a|.|\n|\n| |\u4e2d\u6587"),
    ],
)
def test_splits_of_families(pre: str, words: str, tmp_path: Path) -> None:
    """As the families' own expressions cut text."""
    pre_tokenizer = tokenizer(tmp_path, pre=pre).pre_tokenizer
    assert pre_tokenizer is not None
    cut = pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)
    assert "|".join(SPLIT_TEXT[start:end] for _, (start, end) in cut) == words


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, pre="qwen2")
    assert ours.encode("e\u0301").ids == ours.encode("\u00e9").ids


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_sentencepiece_agrees_with_transformers(tmp_path: Path) -> None:
    target = convert(tmp_path, **SPM)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ours = AutoTokenizer.from_pretrained(target)
    for text in ("the heat", "a thé 日本", "that\n", "x"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"], skip_special_tokens=True) == text


def test_sentencepiece_prefixes_and_falls_back_to_bytes(tmp_path: Path) -> None:
    assert pieces(tmp_path, "the", **SPM) == ["<s>", "▁the"]
    assert pieces(tmp_path, "é", **SPM) == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces(tmp_path, "the", **SPM, add_space_prefix=False) == ["<s>", "t", "he"]
    # As sentencepiece and llama.cpp do, a text that begins with a space gets another.
    assert pieces(tmp_path, " a", **SPM) == ["<s>", "▁", "▁a"]


def test_gemma4_merges_as_listed(tmp_path: Path) -> None:
    """SentencePiece with merges of its own, and no space before the text."""
    gemma = SPM | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["h e", "\u2581 t"]}
    assert pieces(tmp_path, "the the", **gemma) == ["<s>", "t", "he", "\u2581t", "he"]


def test_ends_of_turns(tmp_path: Path) -> None:
    """The end of a message is the end of the turn, but for gpt-oss."""
    tokens = [*byte_tokens(), "<|end|>", "<turn|>"]
    kinds = [3] * 3 + [1] * (len(tokens) - 5) + [3, 4]

    def ends(**changes: Any) -> list[int]:
        target = convert(tmp_path, **changes)
        ids: list[int] = json.loads((target / "generation_config.json").read_text())["eos_token_id"]
        return ids

    end, turn = len(tokens) - 2, len(tokens) - 1
    assert ends(tokens=tokens, token_type=kinds) == [2, end, 0, turn]
    harmony = ["<|return|>", "<|call|>", *tokens[2:]]
    assert ends(tokens=harmony, token_type=kinds, eos_token_id=0) == [0, 2, 1, turn]


def test_template_and_special_tokens(tmp_path: Path) -> None:
    target = convert(tmp_path, add_bos_token=True, add_eos_token=True, padding_token_id=0)
    config = json.loads((target / "tokenizer_config.json").read_text())
    assert config["pad_token"] == "<|endoftext|>"
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    ours = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert ours.encode("a").tokens == ["<|im_start|>", "a", "<|im_end|>"]
    assert ours.decode(ours.encode("a").ids) == "a"
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_user_defined_tokens_stay_text(tmp_path: Path) -> None:
    tokens = byte_tokens()
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    kinds[tokens.index("Ġthe")] = 4
    ours = tokenizer(tmp_path, token_type=kinds)
    assert ours.encode("aĠthea").tokens == ["a", "Ġthe", "a"]
    assert ours.decode(ours.encode("aĠthea").ids) == "a thea"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "bert"}, "unsupported tokenizer 'bert'"),
        ({"model": None}, "unsupported tokenizer ''"),
        ({"model": [1, 2]}, "invalid tokenizer.ggml.model"),
        ({"pre": ["a", "b"]}, "invalid tokenizer.ggml.pre"),
        ({"add_bos_token": [True, False]}, "invalid tokenizer.ggml.add_bos_token"),
        ({"add_eos_token": [True, False]}, "invalid tokenizer.ggml.add_eos_token"),
        ({**SPM, "add_space_prefix": [1.5, 2.5]}, "invalid tokenizer.ggml.add_space_prefix"),
        ({"pre": "future-bpe"}, "unknown pre-tokenizer 'future-bpe'"),
        ({"tokens": None}, "no tokenizer"),
        ({"tokens": [f"t{i}" for i in range(999)], "token_type": None}, "999 tokens"),
        ({"merges": ["a"]}, "invalid merge 'a'"),
        ({"merges": ["a b c"]}, "invalid merge 'a b c'"),
        ({"merges": ["z q"]}, "'z' and 'q'"),
        ({"token_type": [1, 1]}, "invalid tokenizer.ggml.token_type"),
        ({"eos_token_id": 999}, "invalid eos_token_id"),
        ({**SPM, "tokenizer.ggml.tokens": ["x" * 513, "y"], "tokenizer.ggml.scores": [0.0, 0.0],
          "tokenizer.ggml.token_type": None, "tokenizer.ggml.eos_token_id": 1}, "513 characters"),
    ],
)  # fmt: skip
def test_unfit_tokenizers_are_refused(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=f"tiny.gguf.*{complaint}"):
        convert(tmp_path, **change)

"""The splits of text before byte-level merges, by the names that GGUF files give them.

Owns one expression or several for each family of tokenizers, in the syntax of the `tokenizers`
library. A name that is missing here is refused: guessed splits degrade answers without any visible
error.

Splits: `llama_vocab::impl::load` and `llm_tokenizer_bpe` in llama.cpp's src/llama-vocab.cpp, and
the `tokenizer.json` files of the model families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_OTHERS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_OTHERS}"
_GPT4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_WORD}{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}{_OTHERS}"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = (each[:-1] + _NOT_HAN for each in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|{_WORD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_SUFFIXES}?"
    rf"|{_WORD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
)
_IDEOGRAPHS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LETTERS = (  # of DeepSeek LLM: Latin, Greek, Cyrillic, Armenian, Georgian and some others
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    r"ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴ"  # noqa: RUF001
    r"ℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _IDEOGRAPHS,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")


@dataclass(frozen=True, slots=True)
class Split:
    """The way in which one family splits text before merging: by each expression in turn."""

    regexes: tuple[str, ...]
    single_digits: bool = False
    composes: bool = False
    whole_words_first: bool = False
    adds_bos: bool = False


SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        **dict.fromkeys(
            ("default", "gpt-2", "olmo", "exaone4", "granite-docling", "mellum", "phi-2"),
            Split((_GPT2,)),
        ),
        **dict.fromkeys(
            ("smollm", "starcoder", "refact", "exaone", "codeshell"),
            Split((_GPT2,), single_digits=True),
        ),
        "command-r": Split((_GPT2,), single_digits=True, composes=True),
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
            Split((_LLAMA3,), whole_words_first=True, adds_bos=True),
        ),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((_LLAMA3,))),
        "glm4": Split((_LLAMA3,), whole_words_first=True),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((_QWEN2,), composes=True)),
        **dict.fromkeys(("hunyuan", "megrez"), Split((_QWEN2,))),
        "qwen35": Split((_QWEN35,), composes=True),
        "seed-coder": Split((_SEED,)),
        "tekken": Split((_TEKKEN,), whole_words_first=True, adds_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((_GPT4O,))),
        "kimi-k2": Split((_KIMI,)),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(_DEEPSEEK3)),
        "deepseek-llm": Split(_DEEPSEEK_LLM),
        "deepseek-coder": Split(_DEEPSEEK_CODER),
    }
)
"""Splits by the value of `tokenizer.ggml.pre`."""

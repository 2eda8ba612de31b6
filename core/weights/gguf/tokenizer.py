"""A Hugging Face tokenizer from a GGUF file's metadata.

Owns the normalizer, merges and decoder of each `tokenizer.ggml.model`, and the special tokens;
`splits` has those of `.pre`. (transformers' reader guesses: for the embedded model it splits runs
of spaces before digits differently from the model's own tokenizer.)

Kinds: `llama_vocab::impl::load` in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.header import GgufFile
from triptych.core.weights.gguf.splits import SPLITS

MAX_TOKEN_CHARS = 512
T = TypeVar("T")
_CONTROL, _USER_DEFINED = 3, 4
_END_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<|return|>", "<|call|>", "<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>", "[EOT]"),
    *("[EOS]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Tokens that end a turn under any name, as llama.cpp treats them."""
_HARMONY = frozenset(("<|return|>", "<|call|>", "<|end|>"))
"""Tokens of gpt-oss, where the last ends a message and not the turn."""


class _Vocabulary:
    """The tokenizer metadata, checked once."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: Sequence[str] = self._list("tokens", required=True)
        self.merges: Sequence[str] = self._list("merges")
        self.kinds = self._numbers("token_type", 1)
        self.scores = self._numbers("scores", 0.0)
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise WeightsError(f"{file.name} has a vocabulary with a duplicate token.")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def scalar(self, key: str, default: T) -> T:
        return self.file.scalar(f"tokenizer.ggml.{key}", default)

    def special_id(self, name: str) -> int | None:
        """The id that metadata gives the special token `name`, such as `bos`."""
        value = self.get(f"{name}_token_id")
        if value is None or (isinstance(value, int) and 0 <= value < len(self.tokens)):
            return value
        raise WeightsError(f"{self.file.name} has an invalid {name}_token_id.")

    def special_token(self, name: str) -> str | None:
        """The token that metadata gives the special token `name`."""
        token_id = self.special_id(name)
        return None if token_id is None else self.tokens[token_id]

    def _list(self, key: str, *, required: bool = False) -> Sequence[str]:
        value = self.get(key)
        if value is None and not required:
            return []
        if not isinstance(value, list):
            raise WeightsError(
                f"{self.file.name} has no tokenizer: tokenizer.ggml.{key} is missing."
            )
        return value

    def _numbers(self, key: str, default: float) -> np.ndarray[Any, np.dtype[Any]]:
        value = self.get(key)
        if value is None:
            return np.full(len(self.tokens), default)
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise WeightsError(f"{self.file.name} has an invalid tokenizer.ggml.{key}.")
        return value


def tokenizer_files(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`, `tokenizer_config.json` and `generation_config.json` by name.

    Raises `WeightsError` for a tokenizer that cannot be rebuilt exactly.
    """
    vocabulary = _Vocabulary(file)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise WeightsError(
            f"{file.name} has {len(vocabulary.tokens)} tokens, but embeddings for only"
            f" {config['vocab_size']}."
        )
    kind = vocabulary.scalar("model", "")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(vocabulary)
    elif kind in ("llama", "gemma4"):
        tokenizer, adds_bos = _sentencepiece(vocabulary, prefixes=kind == "llama"), True
    else:
        raise WeightsError(f"{file.name} has the unsupported tokenizer {kind!r:.40}.")
    _add_special_tokens(tokenizer, vocabulary)
    adds_bos = vocabulary.scalar("add_bos_token", adds_bos)
    _add_template(tokenizer, vocabulary, adds_bos)
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _tokenizer_config(vocabulary, config, adds_bos),
        "generation_config.json": _generation_config(vocabulary),
    }


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """GPT-2 style BPE over bytes, and whether the family begins texts with BOS."""
    name = vocabulary.scalar("pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise WeightsError(
            f"{vocabulary.file.name} has the unknown pre-tokenizer {name!r:.40};"
            " serve the model's safetensors folder instead."
        )
    tokenizer = Tokenizer(
        _bpe(vocabulary, _given_merges(vocabulary), ignore_merges=split.whole_words_first)
    )
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    cuts = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.regexes]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, *cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _sentencepiece(vocabulary: _Vocabulary, *, prefixes: bool) -> Tokenizer:
    """SentencePiece BPE in Hugging Face's form: merges by score, with byte fallback.

    `prefixes` is whether a space comes before texts, unless the file says so.
    """
    merges = _given_merges(vocabulary) if vocabulary.merges else _merges_by_score(vocabulary)
    tokenizer = Tokenizer(
        _bpe(
            vocabulary,
            merges,
            unk_token=vocabulary.special_token("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = vocabulary.scalar("add_space_prefix", prefixes)
    prefix = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * prefixed)])
    return tokenizer


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    """The BPE model; merges of unknown tokens, which make the library panic, are refused."""
    ids = vocabulary.ids
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise WeightsError(
                f"{vocabulary.file.name} merges {left!r:.40} and {right!r:.40},"
                " which its vocabulary does not have."
            )
    return models.BPE(vocab=ids, merges=merges, **options)


def _given_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    pairs = []
    for merge in vocabulary.merges:
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not right or " " in right:
            raise WeightsError(f"{vocabulary.file.name} has the invalid merge {merge!r:.40}.")
        pairs.append((left, right))
    return pairs


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, best scores first.

    Ties are ordered as in transformers' `generate_merges`.
    """
    ids, merges = vocabulary.ids, []
    for token, token_id in ids.items():
        if len(token) > MAX_TOKEN_CHARS:
            raise WeightsError(f"{vocabulary.file.name} has a token of {len(token)} characters.")
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(float(vocabulary.scores[token_id]), *pair) for pair in pairs]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add control tokens as special, user-defined ones as whole words that stay text."""
    named = map(vocabulary.special_id, ("bos", "eos", "eot", "eom", "padding"))
    special = {token_id for token_id in named if token_id is not None}
    special.update(np.flatnonzero(vocabulary.kinds == _CONTROL).tolist())
    plain = np.flatnonzero(vocabulary.kinds == _USER_DEFINED).tolist()
    for token_id in sorted({*special, *plain}):
        is_special = token_id in special
        token = AddedToken(vocabulary.tokens[token_id], normalized=False, special=is_special)
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])


def _add_template(tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Add BOS and EOS to texts if the file says so."""
    first = vocabulary.special_token("bos") if adds_bos else None
    last = vocabulary.special_token("eos") if vocabulary.scalar("add_eos_token", False) else None
    start, stop = ([] if token is None else [token] for token in (first, last))
    if not start and not stop:
        return
    single = [*start, "$A", *stop]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{part}:1" for part in (*start, "$B", *stop))],
        special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(start + stop)],
    )


def _tokenizer_config(
    vocabulary: _Vocabulary, config: Mapping[str, Any], adds_bos: bool
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
    }
    for ours, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (token := vocabulary.special_token(theirs)) is not None:
            values[f"{ours}_token"] = token
    template = vocabulary.file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        values["chat_template"] = template
    return values


def _generation_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    """The generation config: BOS, and every token that ends an answer."""
    named = (vocabulary.special_id(name) for name in ("eos", "eot", "eom"))
    ends = [token_id for token_id in named if token_id is not None]
    names = [token for token in _END_TOKENS if token in vocabulary.ids]
    if set(names) >= _HARMONY:
        names.remove("<|end|>")
    known = (vocabulary.ids[token] for token in names)
    ends += (i for i in known if vocabulary.kinds[i] in (_CONTROL, _USER_DEFINED))
    values: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))}
    bos = vocabulary.special_id("bos")
    return values if bos is None else {"bos_token_id": bos, **values}

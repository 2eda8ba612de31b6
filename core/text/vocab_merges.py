"""Reads the tokenizer of a Qwen2 from `vocab.json` and `merges.txt`, where no `tokenizer.json` is.

Owns the pieces that these files leave out, as transformers' Qwen2 tokenizer has them: normal form
C, the pattern of words, bytes as letters. Knows no other family of such files.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from triptych.core.errors import WeightsError

VOCAB_FILE, MERGES_FILE, CONFIG_FILE = "vocab.json", "merges.txt", "tokenizer_config.json"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_vocab_merges(folder: Path) -> Tokenizer:
    """The tokenizer. Raises `WeightsError` for another family, and errors of the library."""
    config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    if not str(config.get("tokenizer_class", "")).startswith("Qwen2"):
        raise WeightsError(f"{VOCAB_FILE} and {MERGES_FILE} are read for Qwen2 tokenizers only.")
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / VOCAB_FILE), str(folder / MERGES_FILE)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = config.get("added_tokens_decoder", {})
    for token_id, fields in sorted(added.items(), key=lambda item: int(item[0])):
        known = {name: fields[name] for name in ("lstrip", "rstrip", "normalized", "single_word")}
        token = AddedToken(fields["content"], special=fields["special"], **known)
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(fields["content"]) != int(token_id):
            raise WeightsError(
                f"{CONFIG_FILE}: the added token {token_id} does not fit the others."
            )
    return tokenizer

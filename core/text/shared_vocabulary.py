"""Whether two models have one vocabulary."""

from __future__ import annotations

from pathlib import Path

from triptych.core.text.tokenizer import read_tokenizer


def num_different_tokens(folder: Path, other: Path, name: str) -> int:
    """How many tokens that the models in both folders have are other texts. One may have more."""
    own, others = (read_tokenizer(each, name).get_vocab() for each in (folder, other))
    texts = {token_id: text for text, token_id in own.items()}
    return sum(texts.get(token_id, text) != text for text, token_id in others.items())

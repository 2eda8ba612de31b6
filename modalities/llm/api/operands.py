"""The first word of `triptych chat`: a model, or the beginning of the prompt.

Owns the rule. A model is a hub id, a file or folder, or a word that is exactly the name of a model;
a misspelled name is an error, so that no model is asked about the name of another one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from triptych.core.client.choice import served_names
from triptych.core.errors import ConfigError
from triptych.core.process.lazy import load
from triptych.core.process.suggestions import nearest

_NAME = re.compile(r"(?=.*[\d-])[A-Za-z][\w.:-]*")
"""Names of models have a digit or a hyphen; plain words belong to prompts."""
_PART = r"[\w.-]*[A-Za-z][\w.-]*"
_HUB_ID = re.compile(rf"(?=.*[\d-]){_PART}/{_PART}")


def split_operands(args: argparse.Namespace) -> tuple[str, Sequence[str]]:
    """Return the model of a command's operands, or an empty text, and the words of the prompt.

    With `--model`, all words are the prompt. Raises `ConfigError` for a misspelled model.
    """
    words: Sequence[str] = args.operands
    if not words or getattr(args, "model", None):
        return "", words
    first = words[0]
    if _HUB_ID.fullmatch(first) or _is_path(first):
        return first, words[1:]
    if not _NAME.fullmatch(first):
        return "", words
    known = {*known_models(), *served_names(args)}
    if first in known:
        return first, words[1:]
    check_spelling(first, known)
    return "", words


def known_models() -> list[str]:
    """Return the short names of models."""
    names = [source.name for source in load("triptych.modalities.registry:known_sources")()]
    return [load("triptych.core.weights.resolve:EMBEDDED_NAME"), *names]


def check_spelling(word: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a word that is nearly the name of a model."""
    if near := nearest(word, known):
        raise ConfigError(
            f"There is no model {word!r}; did you mean {near}? To ask {word!r}, name the model"
            " with --model."
        )


def _is_path(word: str) -> bool:
    path = Path(word).expanduser()
    return (word.endswith(".gguf") and path.is_file()) or ("/" in word and path.is_dir())

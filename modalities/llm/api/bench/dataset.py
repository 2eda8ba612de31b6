"""Prompts of a benchmark from a file: JSON Lines, or ShareGPT's conversations.

Owns both formats and the choice of rows. Knows no server.

    JSON Lines   {"prompt": "..."} or {"messages": [...]}, optionally "max_tokens"
    ShareGPT     a JSON array of {"conversations": [{"from": "human", "value": "..."}, ...]}: the
                 first turn is the prompt, the answer after it gives the length
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from triptych.core.errors import ConfigError
from triptych.modalities.llm.api.bench.client import Prompt

_HUMAN = ("human", "user")


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt (a text, or the messages of a conversation) and the most tokens of its answer."""

    prompt: Prompt
    max_tokens: int


def read_dataset(path: Path, *, output_tokens: int, tokens_per_word: float) -> list[Ask]:
    """Read the prompts of a file; `output_tokens` is the length where a row has none.

    Raises `ConfigError` for a file without usable rows.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        rows = list(_rows(text))
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--dataset {path.name}: cannot be read as JSON Lines or as ShareGPT's JSON."
        ) from error
    found = [_ask(row, output_tokens, tokens_per_word) for row in rows if isinstance(row, dict)]
    asks = [ask for ask in found if ask is not None]
    if not asks:
        raise ConfigError(f"--dataset {path.name}: no row has a prompt, messages or conversations.")
    return asks


def choose(asks: Sequence[Ask], num_requests: int, seed: str) -> list[Ask]:
    """Choose rows at random, each as often as any other."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    chosen: list[Ask] = []
    while len(chosen) < num_requests:
        chosen += source.sample(asks, len(asks))
    return chosen[:num_requests]


def _rows(text: str) -> Iterator[Any]:
    if text.lstrip().startswith("["):
        yield from msgspec.json.decode(text)
        return
    for line in text.split("\n"):
        if line.strip():
            yield msgspec.json.decode(line)


def _ask(row: dict[str, Any], output_tokens: int, tokens_per_word: float) -> Ask | None:
    length = row.get("max_tokens")
    max_tokens = length if isinstance(length, int) and length > 0 else output_tokens
    for name in ("prompt", "messages"):
        if row.get(name):
            return Ask(row[name], max_tokens)
    turns = row.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    question, answer = turns[:2]
    if not isinstance(question, dict) or not isinstance(answer, dict):
        return None
    if question.get("from") not in _HUMAN:
        return None
    words = len(str(answer.get("value", "")).split())
    return Ask(str(question.get("value", "")), max(1, round(words * tokens_per_word)))

"""A token step as the policy chooses it, and the limits that its owner sets for the choice.

Owns the data alone: `policy` chooses a step, `batch` books it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych.schedulers.batcher import ScheduledStep
from triptych.schedulers.tokens.state import SequenceState
from triptych.schedulers.tokens.step_shares import StepTurn


@dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A waiting row that starts with `num_cached` cached pages and will hold `num_pages`."""

    row: SequenceState
    num_cached: int
    num_pages: int


def _never_cut_earlier(row: SequenceState, start: int, end: int) -> int:
    return end


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The rows that their owner keeps out of a step, and the size of the step.

    Rows with these `names`, or of these `clients`, take no part, waiting or running; prompts take
    `max_prompt_tokens` at most, and `max_answering` rows decode a token, those of all clients in
    turn. `chunk_end` returns where a chunk of a row's prompt that begins at `start`, with room up
    to `end`, has to end: at `start` if it has to wait, beyond `end` where it cannot be cut earlier.
    A retry after an OutOfMemory is not limited.
    """

    names: frozenset[str] = frozenset()
    max_prompt_tokens: int = sys.maxsize
    max_answering: int = sys.maxsize
    chunk_end: Callable[[SequenceState, int, int], int] = _never_cut_earlier
    clients: frozenset[str] = frozenset()

    def excludes(self, row: SequenceState) -> bool:
        """Whether a row takes no part."""
        return row.name in self.names or row.client in self.clients


UNLIMITED = TokenLimits()


@dataclass(slots=True, kw_only=True)
class TokenStep(ScheduledStep):
    """A token step, and the changes that booking it makes. Decode rows come first.

    Rows in `awaited` wait for so many of their leading pages.
    """

    kind: str = "prefill"
    rows: list[Any] = field(default_factory=list)
    victims: list[SequenceState] = field(default_factory=list)
    admissions: list[AdmittedRow] = field(default_factory=list)
    overtaken: list[SequenceState] = field(default_factory=list)
    awaited: list[tuple[SequenceState, int]] = field(default_factory=list)
    is_retry: bool = False
    turn: StepTurn | None = None

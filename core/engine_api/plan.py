"""The plan of a step and its result. Plain data, no tensors.

Owns the types between schedulers, which decide, and runners, which compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from triptych.core.engine_api.frames import StepCodes
from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.engine_api.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step for one model. Modalities extend it with their rows."""

    step_id: int
    model: str
    kind: str


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Rank 0's plan as it is sent to the other ranks of a model.

    Without `is_shared` the ranks do not wait for each other in it.
    """

    plan: Plan
    is_shared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a plan: one entry per row, in order.

    `elapsed_s` is how long the step was the device's only work, until `ended_s` on the engine's
    clock; the code that waits for the step fills both in.
    """

    rows: Sequence[Any] = ()
    elapsed_s: float = 0.0
    ended_s: float | None = None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One row's part of a token step.

    Positions `start .. start + num_tokens` are computed. `token_ids` holds their input tokens; it
    is empty for a decode row, whose input is the token last sampled for this slot. `new_page_ids`
    extend the slot's page table. Where layers with a window have pages of their own,
    `new_window_ids` extend the table of those; no page before the row's `first_window` is read from
    now on, and at a start the table begins there. A row with `is_sampled` yields a token; a prompt
    chunk that does not reach the end of its prompt does not. `allowed` is the token mask of the
    row's grammar, one bit per token in little-endian 32-bit words, lowest first; empty without one.

    The last `num_drafts` of `token_ids` are guesses: a token is sampled at the position before each
    of them and at the last one, so that the row yields `1 + num_drafts` tokens. `allowed` is for
    the first of these; `draft_masks` are those of the tokens after each guess, if there are any.
    The first `num_relaxed` guesses are reasoning, for which a relaxed rule holds.

    In a model with recurrent layers, a row that starts at 0 begins with the state before any token,
    one with a `restored_snapshot` (not -1) with that, and any other with the state in its slot. The
    states before the positions in `saved_snapshots`, `(position, snapshot)` in order, are saved.

    A row with `sampling` takes its slot with this step, and the runner keeps the fields after it
    until another row takes the slot. `history_ids` is prompt plus output so far (a resumed row has
    both); `num_prompt_tokens` is where the output begins, for penalties that count output only.
    `frames` are the codes of the frame ids in `history_ids`, in order (see
    `core.engine_api.frames`); `contents` fill the positions with content ids (see
    `core.engine_api.prompt_content`). `adapter` is the slot of its adapter; -1: none.
    """

    job_id: str
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    new_page_ids: tuple[int, ...] = ()
    new_window_ids: tuple[int, ...] = ()
    first_window: int = 0
    is_sampled: bool = True
    num_drafts: int = 0
    allowed: bytes = b""
    draft_masks: tuple[bytes, ...] = ()
    num_relaxed: int = 0
    restored_snapshot: int = -1
    saved_snapshots: tuple[tuple[int, int], ...] = ()
    sampling: SamplingParams | None = None
    history_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    frames: tuple[StepCodes, ...] = ()
    contents: tuple[ContentSpan, ...] = ()
    adapter: int = -1

    def allowed_after(self, num_drafts: int) -> bytes:
        """The mask of the token after the first `num_drafts` guesses; empty without one."""
        if num_drafts == 0:
            return self.allowed
        return self.draft_masks[num_drafts - 1] if self.draft_masks else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(Plan):
    """A step of a token model: decode rows first, then prompt chunks."""

    rows: tuple[TokenRow, ...]

    @property
    def starts(self) -> tuple[TokenRow, ...]:
        """Rows that take their slots with this step."""
        return tuple([row for row in self.rows if row.sampling is not None])

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the model in this step."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan(Plan):
    """A step of the model that drafts for another one.

    Its rows bring the tokens that it has not seen yet; then it samples `num_drafts` tokens of each,
    none where 0. Slots are those of the other model, pages its own. A row's result has as many
    tokens, or fewer where its values are not finite.
    """

    rows: tuple[TokenRow, ...]
    num_drafts: tuple[int, ...]


class PendingStep(Protocol):
    """Device work in flight.

    `result` is called once per step, in plan order, on a separate thread: it may overlap the launch
    of the next plan.
    """

    def result(self) -> StepResult:
        """Wait for the device and return the result; raises the step's error."""
        ...


class Runner(Protocol):
    """Turns plans into device work. Called from one device thread, in plan order."""

    def launch(self, plan: Plan) -> PendingStep:
        """Start `plan`. On a GPU this returns before the work is done.

        Even when it raises, the plan's slots and pages are recorded: the next plan may already be
        queued and relies on them.
        """
        ...

    def close(self) -> None:
        """Free all buffers."""
        ...

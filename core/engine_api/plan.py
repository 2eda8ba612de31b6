"""Plan and result: what runs in one step, and what came of it. Plain data, no tensors.

Owns the hand-over between schedulers (which decide) and runners (which compute).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
class Told:
    """What other ranks of a divided model run of rank 0's plan.

    If it is not `is_shared`, none waits for another in it.
    """

    plan: Plan
    is_shared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of a plan: one entry per row of it, in order.

    `elapsed_s` is how long the step was the device's only work; whoever waited for it fills it in.
    """

    rows: Sequence[Any] = ()
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One row's part of a token step.

    Positions `start .. start + num_tokens` are computed. `token_ids` holds their input tokens; it
    is empty for a decode row, whose input is the token the runner sampled last for this slot.
    `new_page_ids` extend the slot's page table. A row that `is_sampled` yields a token; a prompt
    chunk that does not reach the end of its prompt is not. Where a grammar says what it may be,
    `allowed` has a bit per token, in little-endian 32-bit words, lowest first; else it is empty.

    One that has `sampling` takes its slot with this step, and the fields after it are what the
    runner keeps until another does. `history_ids` is prompt plus output so far (a resumed row has
    both); `num_prompt_tokens` says where the output begins, for penalties that count output only.
    `frames` are the codes of the frame ids among `history_ids`, in their order (see
    `core.engine_api.frames`), `contents` what fills the positions with ids of content (see
    `core.engine_api.prompt_content`).
    """

    job_id: str
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    new_page_ids: tuple[int, ...] = ()
    is_sampled: bool = True
    allowed: bytes = b""
    sampling: SamplingParams | None = None
    history_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    frames: tuple[StepCodes, ...] = ()
    contents: tuple[ContentSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(Plan):
    """A step of a token model: decode rows first, then prompt chunks."""

    rows: tuple[TokenRow, ...]

    @property
    def starts(self) -> tuple[TokenRow, ...]:
        """Rows that take their slots, before anything runs."""
        return tuple(row for row in self.rows if row.sampling is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the model in this step."""
        return sum(row.num_tokens for row in self.rows)


class PendingStep(Protocol):
    """Device work in flight.

    `result` is called once per step, in plan order, on a thread of its own: it may overlap the
    launch of the next plan.
    """

    def result(self) -> StepResult:
        """Wait for the device and return what came of the step; raises what the step raised."""
        ...


class Runner(Protocol):
    """Turns plans into device work. Called from one device thread, in plan order."""

    def launch(self, plan: Plan) -> PendingStep:
        """Start `plan`. On a GPU this returns before the work is done.

        Where it raises, the plan's slots and pages have been taken note of all the same: the next
        plan may be on its way already, and counts on them.
        """
        ...

    def close(self) -> None:
        """Give every buffer back."""
        ...

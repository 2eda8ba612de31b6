"""Recurrent states that hold digests: `token_world` checks that each row goes on from its own past.

A state is the digest of the last token that it has seen, and the job and step that made it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from triptych.core.engine_api.plan import TokenPlan, TokenRow

START = b"no token"


@dataclass
class State:
    """What a line holds."""

    digest: bytes = b"garbage"
    job_id: str = ""
    step_id: int = -1


class ShadowStates:
    """The states of slots and snapshots."""

    def __init__(self) -> None:
        self.slots: dict[int, State] = {}
        self.snapshots: dict[int, State] = {}
        self.kept: dict[int, tuple[int, State]] = {}
        self.ends: dict[int, int] = {}
        self.num_gone_back = 0
        self.num_restored = 0

    def begin(self, plan: TokenPlan, in_flight: Collection[int]) -> None:
        """Before the rows of a step are computed, in any order."""
        for row in plan.rows:
            if row.start == 0:
                self.slots[row.slot] = State(START, row.job_id)
            elif row.restored_snapshot >= 0:
                found = self.snapshots[row.restored_snapshot]
                is_over = found.step_id not in in_flight
                assert is_over, "a snapshot was found before its commit"
                self.slots[row.slot] = State(found.digest, row.job_id)
                self.num_restored += 1
            elif row.start != self.ends[row.slot]:
                position, state = self.kept[row.slot]
                assert position == row.start, "a row starts where its state is known"
                self.slots[row.slot] = state
                self.num_gone_back += 1

    def go_on(
        self,
        row: TokenRow,
        digests: list[bytes],
        step_id: int,
        *,
        is_checked: bool,
        is_right: bool,
    ) -> None:
        """Compute a row; `digests` are those of its positions, if its drafts are right."""
        state = self.slots[row.slot]
        if is_checked:
            past = digests[row.start - 1] if row.start else START
            assert state.digest == past, f"{row.job_id} goes on from another state"
            assert state.job_id == row.job_id
        end = row.start + row.num_tokens
        certain_end = end - row.num_drafts
        self.slots[row.slot] = State(digests[end - 1], row.job_id, step_id)
        if not is_right:
            self.slots[row.slot].digest = b"rejected"
        self.kept[row.slot] = (
            certain_end,
            State(digests[certain_end - 1], row.job_id, step_id),
        )
        self.ends[row.slot] = end
        places = [position for position, _ in row.saved_snapshots]
        assert places == sorted(set(places))
        assert all(row.start < position <= certain_end for position in places)

    def end(self, plan: TokenPlan, stories: dict[str, Any]) -> None:
        """After them."""
        taken = [snapshot for row in plan.rows for _, snapshot in row.saved_snapshots]
        assert len(taken) == len(set(taken)), "two states are saved in one snapshot"
        for row in plan.rows:
            for position, snapshot in row.saved_snapshots:
                digest = stories[row.job_id].digests[position - 1]
                self.snapshots[snapshot] = State(digest, row.job_id, plan.step_id)

    def spoil(self, plan: TokenPlan) -> None:
        """The plan raised: what it, and what came after it for its rows, left is garbage."""
        job_ids = {row.job_id for row in plan.rows}
        kept = (state for _, state in self.kept.values())
        for state in (*self.slots.values(), *self.snapshots.values(), *kept):
            if state.job_id in job_ids and state.step_id >= plan.step_id:
                state.digest = b"garbage"

"""Runs the plans of a token model and of the smaller model or head that drafts for it.

Owns the order of the drafting model's forward passes within a step. Both models keep their own
pages; slots are the same. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from triptych.core.engine_api.plan import (
    DraftPlan,
    PendingStep,
    Plan,
    Runner,
    StepResult,
    TokenPlan,
    TokenRow,
)
from triptych.core.engine_api.tokens import TokenDelta


class DraftingRunner:
    """Implements `core.engine_api.plan.Runner`: `DraftPlan`s go to `draft`, others to `target`.

    With a `mask_token_id` all tokens of a draft are computed in one pass, of the text's last token
    and as many masks.
    """

    mask_token_id: int | None = None

    def __init__(self, target: Runner, draft: Runner) -> None:
        self._target = target
        self._draft = draft

    def launch(self, plan: Plan) -> PendingStep:
        """Start `plan`; see `core.engine_api.plan.Runner.launch`."""
        if not isinstance(plan, DraftPlan):
            return self._target.launch(plan)
        if (mask_id := self.mask_token_id) is not None:
            pairs = zip(plan.rows, plan.num_drafts, strict=True)
            rows = tuple([_with_block(row, most, mask_id) for row, most in pairs])
            return PendingDrafts(rows, [rows], [self._launch(plan, rows)])
        parts, pending = [plan.rows], [self._launch(plan, plan.rows)]
        for number in range(1, max(plan.num_drafts)):
            pairs = zip(plan.rows, plan.num_drafts, strict=True)
            parts.append(tuple([_follower(row, number) for row, most in pairs if number < most]))
            pending.append(self._launch(plan, parts[-1]))
        return PendingDrafts(plan.rows, parts, pending)

    def close(self) -> None:
        """Release both models."""
        self._target.close()
        self._draft.close()

    def _launch(self, plan: DraftPlan, rows: tuple[TokenRow, ...]) -> PendingStep:
        planned = TokenPlan(step_id=plan.step_id, model=plan.model, kind=plan.kind, rows=rows)
        return self._draft.launch(planned)


def _follower(row: TokenRow, number: int) -> TokenRow:
    """The row's forward pass for its draft of this number: its input is the draft before."""
    start = row.start + row.num_tokens + number - 1
    return TokenRow(job_id=row.job_id, slot=row.slot, start=start, num_tokens=1)


def _with_block(row: TokenRow, num_drafts: int, mask_id: int) -> TokenRow:
    """The row with a block of its last token and masks after the tokens that it follows."""
    if not num_drafts:
        return row
    block = (row.token_ids[-1], *[mask_id] * num_drafts)
    return structs.replace(
        row,
        num_tokens=row.num_tokens + len(block),
        token_ids=(*row.token_ids, *block),
        num_drafts=num_drafts - 1,
    )


class PendingDrafts:
    """Implements `core.engine_api.plan.PendingStep`: passes of the drafting model in flight."""

    def __init__(
        self,
        rows: Sequence[TokenRow],
        parts: Sequence[Sequence[TokenRow]],
        pending: Sequence[PendingStep],
    ) -> None:
        self._rows, self._parts, self._pending = rows, parts, pending

    def result(self) -> StepResult:
        """Wait for all passes: the drafts of each row, up to one that is not finite."""
        drafts: dict[int, list[int]] = {row.slot: [] for row in self._rows}
        for number, (rows, step) in enumerate(zip(self._parts, self._pending, strict=True)):
            for row, found in zip(rows, step.result().rows, strict=True):
                if len(drafts[row.slot]) == number:
                    drafts[row.slot] += found.token_ids
        return StepResult(rows=tuple(TokenDelta(token_ids=tuple(each)) for each in drafts.values()))

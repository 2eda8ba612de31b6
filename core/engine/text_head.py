"""Tokens of text: an embedding looked up in the model, one id drawn from its logits.

Owns each slot's last token, on the device, and the scores of prompts. Implements
`core.engine.token_runner.TokenHead`. Any model that writes tokens over a paged cache can be driven
by it.

Shapes: T tokens of the step, R rows of logits, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from triptych.core.engine.token_runner import DeviceStep, HostStep
from triptych.core.kernels.paged_attention import Int64s
from triptych.core.layers.attention import KvCache, PagedStep
from triptych.core.plan import SlotStart, TokenRow, TokenRowResult
from triptych.core.sampling.logprobs import Logprobs
from triptych.core.sampling.sampler import SampledTokens, Sampler
from triptych.core.tokens import TokenLogprob

_PROMPT_LOGITS_ROWS = 128  # positions scored at once for prompt log-probabilities


@runtime_checkable
class CausalModel(Protocol):
    """What this head asks of a model; `core.layers.decoder.Decoder` is the usual one."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """`hidden_TC`."""
        ...

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """`logits_RV`."""
        ...


class TextHead:
    """Drives a `CausalModel` with a `Sampler`."""

    def __init__(
        self, model: CausalModel, sampler: Sampler, *, max_batch_size: int, device: torch.device
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._device = device
        self._last_tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._prompts: dict[int, SlotStart] = {}  # slots that want prompt log-probabilities
        self._stateful: set[int] = set()  # slots that want their state instead of a token

    def bind(self, start: SlotStart) -> None:
        """Take the slot's sampling state, and its prompt where that shall be scored."""
        self._sampler.bind(start)
        self._prompts.pop(start.slot, None)
        if start.sampling.prompt_logprobs:
            self._prompts[start.slot] = start
        self._stateful.discard(start.slot)
        if start.sampling.returns_state:
            self._stateful.add(start.slot)

    def lay_out(self, step: HostStep) -> Sequence[Int64s]:
        """The prompt ids."""
        return (step.token_ids_T,)

    def forward(self, step: DeviceStep, kv: KvCache) -> torch.Tensor:
        """`hidden_TC`; decode rows go in as what they drew last."""
        (token_ids_T,) = step.extras
        self._feed_back(token_ids_T, step)
        return self._model.forward(token_ids_T, step.positions_T, PagedStep(kv, step.batch))

    def draw(self, step: DeviceStep, hidden_TC: torch.Tensor) -> TextDraws:
        """One token per sampled row, and the scores of prompts that asked for them."""
        prompt_scores = {
            index: self._score_prompt(row, hidden_TC[first : first + row.num_tokens])
            for index, (row, first) in enumerate(zip(step.rows, step.row_starts, strict=True))
            if row.slot in self._prompts and row.token_ids
        }
        draws = TextDraws(step.rows, None, prompt_scores)
        rows = [row for row in step.rows if row.is_sampled]
        index_R, slots_R = step.sampled_index_R, step.sampled_slots_R
        if any(row.slot in self._stateful for row in rows):
            wanted = [place for place, row in enumerate(rows) if row.slot in self._stateful]
            draws.states = States([rows[place] for place in wanted], hidden_TC[index_R[wanted]])
            others = [place for place, row in enumerate(rows) if row.slot not in self._stateful]
            rows = [rows[place] for place in others]
            index_R, slots_R = index_R[others], slots_R[others]
        if rows:
            logits_RV = self._model.logits(hidden_TC.index_select(0, index_R))
            draws.sampled = self._sampler.sample(
                logits_RV, [row.slot for row in rows], [row.start + row.num_tokens for row in rows]
            )
            self._last_tokens.index_copy_(0, slots_R, draws.sampled.token_ids_B)
        return draws

    def _feed_back(self, token_ids_T: torch.Tensor, step: DeviceStep) -> None:
        """Decode rows go on from what they drew last."""
        slots_D = step.decode_slots_D
        token_ids_T[: len(slots_D)] = self._last_tokens.index_select(0, slots_D)

    def _score_prompt(self, row: TokenRow, hidden_TC: torch.Tensor) -> list[_Scores]:
        """Log-probabilities of the prompt tokens that follow this chunk's positions."""
        start = self._prompts[row.slot]
        num_top = start.sampling.top_logprobs or 0
        end = min(row.start + row.num_tokens, start.num_prompt_tokens - 1)
        scores = []
        for first in range(row.start, end, _PROMPT_LOGITS_ROWS):
            last = min(first + _PROMPT_LOGITS_ROWS, end)
            logits_TV = self._model.logits(hidden_TC[first - row.start : last - row.start])
            next_ids = torch.tensor(start.history_ids[first + 1 : last + 1], device=self._device)
            logprobs = self._sampler.prompt_logprobs(logits_TV, next_ids, num_top)
            scores.append(_Scores(logprobs, [num_top] * (last - first)))
        return scores


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-probabilities of some prompt tokens, and how many alternatives each reports."""

    logprobs: Logprobs
    num_top: list[int]

    def entries(self) -> tuple[TokenLogprob, ...]:
        return self.logprobs.to_entries(self.num_top)


@dataclass(frozen=True, slots=True)
class States:
    """Final states `[R, C]` of the rows that end with theirs instead of a token."""

    rows: Sequence[TokenRow]
    states_RC: torch.Tensor

    def by_slot(self) -> dict[int, TokenRowResult]:
        """Each row's result; waits for the device."""
        states_RC = self.states_RC.float().cpu().numpy()
        return {
            row.slot: TokenRowResult(
                state=state_C.astype("<f4").tobytes(), is_finite=bool(np.isfinite(state_C).all())
            )
            for row, state_C in zip(self.rows, states_RC, strict=True)
        }


@dataclass(slots=True)
class TextDraws:
    """What a step will yield: a draw or a state for its sampled rows, scores by row index."""

    rows: Sequence[TokenRow]
    sampled: SampledTokens | None
    prompt_scores: dict[int, list[_Scores]]
    states: States | None = None

    def to_results(self) -> tuple[TokenRowResult, ...]:
        """One entry per row; see `core.engine.token_runner.StepDraws`."""
        sampled = iter(self.sampled.to_results() if self.sampled else ())
        states = self.states.by_slot() if self.states else {}
        return tuple(
            self._with_scores(
                index,
                TokenRowResult()
                if not row.is_sampled
                else states[row.slot]
                if row.slot in states
                else next(sampled),
            )
            for index, row in enumerate(self.rows)
        )

    def _with_scores(self, index: int, row: TokenRowResult) -> TokenRowResult:
        scores = self.prompt_scores.get(index)
        if scores is None:
            return row
        entries = tuple(chain.from_iterable(score.entries() for score in scores))
        return replace(row, prompt_logprobs=entries)

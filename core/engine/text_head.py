"""Tokens of text: an embedding looked up in the model, one id drawn from its logits.

Owns each slot's last token, on the device, and the scores of prompts. Implements
`core.engine.token_runner.TokenHead`. Any model that writes tokens over a paged cache can be driven
by it.

Shapes: T tokens of the step, R rows of logits, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from triptych.core.engine.token_runner import RowResults, StepLayout
from triptych.core.kernels.paged_attention import Int64s
from triptych.core.layers.attention import KvCache, PagedStep
from triptych.core.plan import SlotStart, TokenRow, TokenRowResult
from triptych.core.sampling.host_copy import HostCopy
from triptych.core.sampling.logprobs import Logprobs
from triptych.core.sampling.sampler import SampledTokens, Sampler
from triptych.core.tokens import TokenLogprob

_PROMPT_LOGITS_ROWS = 128  # positions scored at once for prompt log-probabilities
_Scores = Callable[[], tuple[TokenLogprob, ...]]
"""Log-probabilities of some prompt tokens, on their way to the host."""


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
        """Take the slot's sampling state, and its prompt where that is to be scored."""
        self._sampler.bind(start)
        self._prompts.pop(start.slot, None)
        if start.sampling.prompt_logprobs:
            self._prompts[start.slot] = start
        self._stateful.discard(start.slot)
        if start.sampling.returns_state:
            self._stateful.add(start.slot)

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """The prompt ids."""
        return (step.token_ids_T,)

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """`hidden_TC`; decode rows go in as what they drew last."""
        (token_ids_T,) = step.extras
        self._feed_back(token_ids_T, step)
        return self._model.forward(token_ids_T, step.positions_T, PagedStep(kv, step.batch))

    def draw(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """One token or state per sampled row, and the scores of prompts that asked for them."""
        scores = {
            row.slot: self._score_prompt(row, hidden_TC[first : first + row.num_tokens])
            for row, first in zip(step.rows, step.row_starts, strict=True)
            if row.slot in self._prompts and row.token_ids
        }
        rows = [row for row in step.rows if row.is_sampled]
        index_R, slots_R = step.sampled_index_R, step.sampled_slots_R
        ending = {row.slot for row in rows} & self._stateful
        states_RC = None
        if ending:
            # By lists: a mask on the device would be waited for.
            at = [n for n, row in enumerate(rows) if row.slot in ending]
            states_RC = HostCopy(hidden_TC[index_R[at]].float())
            others = [n for n, row in enumerate(rows) if row.slot not in ending]
            rows, index_R, slots_R = [rows[n] for n in others], index_R[others], slots_R[others]
        sampled = None
        if rows:
            logits_RV = self._model.logits(hidden_TC.index_select(0, index_R))
            sampled = self._sampler.sample(
                logits_RV, [row.slot for row in rows], [row.start + row.num_tokens for row in rows]
            )
            self._last_tokens.index_copy_(0, slots_R, sampled.token_ids_B)
        return partial(_results, step.rows, sampled, ending, states_RC, scores)

    def _feed_back(self, token_ids_T: torch.Tensor, step: StepLayout) -> None:
        """Decode rows go on from what they drew last."""
        slots_D = step.decode_slots_D
        token_ids_T[: len(slots_D)] = self._last_tokens.index_select(0, slots_D)

    def _score_prompt(self, row: TokenRow, hidden_TC: torch.Tensor) -> list[_Scores]:
        """Log-probabilities of the prompt tokens that follow this chunk's positions."""
        start = self._prompts[row.slot]
        num_top = start.sampling.top_logprobs or 0
        end = min(row.start + row.num_tokens, start.num_prompt_tokens - 1)
        scores: list[_Scores] = []
        for first in range(row.start, end, _PROMPT_LOGITS_ROWS):
            last = min(first + _PROMPT_LOGITS_ROWS, end)
            logits_TV = self._model.logits(hidden_TC[first - row.start : last - row.start])
            next_ids = torch.tensor(start.history_ids[first + 1 : last + 1], device=self._device)
            logprobs = Logprobs.of(logits_TV, next_ids, num_top)
            scores.append(partial(logprobs.to_entries, [num_top] * (last - first)))
        return scores


def _results(
    rows: Sequence[TokenRow],
    sampled: SampledTokens | None,
    ending: Collection[int],
    states_RC: HostCopy | None,
    scores: Mapping[int, Sequence[_Scores]],
) -> tuple[TokenRowResult, ...]:
    """One entry per row, after waiting for the device; those in `ending` slots yield states."""
    drawn = iter(sampled.to_results() if sampled else ())
    states = iter(() if states_RC is None else states_RC.get().numpy())
    results = []
    for row in rows:
        result = TokenRowResult()
        if row.is_sampled and row.slot in ending:
            state_C = next(states)
            is_finite = bool(np.isfinite(state_C).all())
            result = TokenRowResult(state=state_C.astype("<f4").tobytes(), is_finite=is_finite)
        elif row.is_sampled:
            result = next(drawn)
        if row.slot in scores:
            entries = chain.from_iterable(entries() for entries in scores[row.slot])
            result = replace(result, prompt_logprobs=tuple(entries))
        results.append(result)
    return tuple(results)

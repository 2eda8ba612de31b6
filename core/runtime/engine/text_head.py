"""Tokens of text: an embedding looked up in the model, one id sampled from its logits.

Owns each slot's last token, on the device, and the scores of prompts. Implements
`core.runtime.engine.token_runner.TokenHead`. Any model that writes tokens over a paged cache can be
driven by it.

Shapes: T tokens of the step, R rows of logits, E rows that end, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob
from triptych.core.runtime.decoders.causal_model import PROMPT_LOGITS_ROWS, CausalModel
from triptych.core.runtime.devices.transfer import sent
from triptych.core.runtime.engine.token_runner import RowResults, StepLayout
from triptych.core.runtime.kernels.paged_attention import Int64s
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.logprobs import Logprobs

_Scores = Callable[[], tuple[TokenLogprob, ...]]
"""Log-probabilities of some prompt tokens, on their way to the host."""


class TokenSamples(Protocol):
    """What a sampler sampled: on the device for the next step, and on its way to the host."""

    @property
    def token_ids_B(self) -> torch.Tensor:  # noqa: N802 - a shape
        """One id per row."""
        ...

    def to_results(self) -> tuple[TokenDelta, ...]:
        """Wait for the copies."""
        ...


class TokenSampler(Protocol):
    """What this head asks of what samples; `core.runtime.sampling.sampler.Sampler` says more."""

    def bind(self, row: TokenRow) -> None:
        """Take a slot for a row."""
        ...

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
    ) -> TokenSamples:
        """Sample one token per row."""
        ...


class TextHead:
    """Drives a `CausalModel` with a `Sampler`."""

    def __init__(
        self,
        model: CausalModel,
        sampler: TokenSampler,
        *,
        max_batch_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._device = device
        self._last_tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._prompts: dict[int, TokenRow] = {}  # slots that want prompt log-probabilities
        self._stateful: set[int] = set()  # slots that want their state instead of a token

    def bind(self, row: TokenRow) -> None:
        """Take the slot's sampling state, and its prompt where that is to be scored."""
        assert row.sampling is not None, "it takes its slot"
        self._sampler.bind(row)
        self._prompts.pop(row.slot, None)
        if row.sampling.prompt_logprobs:
            self._prompts[row.slot] = row
        self._stateful.discard(row.slot)
        if row.sampling.returns_state:
            self._stateful.add(row.slot)

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """The prompt ids."""
        return (step.token_ids_T,)

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """`hidden_TC`; decode rows go in as what they sampled last."""
        (token_ids_T,) = step.extras
        self._feed_back(token_ids_T, step)
        return self._model.forward(token_ids_T, step.positions_T, PagedStep(kv, step.batch))

    def sample(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """One token or state per sampled row, and the scores of prompts that asked for them."""
        scores = {
            row.slot: self._score_prompt(row, hidden_TC[first : first + row.num_tokens])
            for row, first in zip(step.rows, step.row_starts, strict=True)
            if row.slot in self._prompts and row.token_ids
        }
        rows = [row for row in step.rows if row.is_sampled]
        index_R, slots_R = step.sampled_index_R, step.sampled_slots_R
        ending = {row.slot for row in rows} & self._stateful
        states_EC: HostCopy | None = None
        if ending:
            # By numbers: a mask on the device would be waited for.
            ended = [n for n, row in enumerate(rows) if row.slot in ending]
            index_E = index_R.index_select(0, self._numbers(ended))
            states_EC = HostCopy(hidden_TC.index_select(0, index_E).float())
            others = [n for n, row in enumerate(rows) if row.slot not in ending]
            rows, of_others = [rows[n] for n in others], self._numbers(others)
            index_R, slots_R = (x.index_select(0, of_others) for x in (index_R, slots_R))
        sampled = None
        if rows:
            logits_RV = self._model.logits(hidden_TC.index_select(0, index_R))
            sampled = self._sampler.sample(
                logits_RV,
                [row.slot for row in rows],
                [row.start + row.num_tokens for row in rows],
                [row.allowed for row in rows],
            )
            self._last_tokens.index_copy_(0, slots_R, sampled.token_ids_B)
        return partial(_results, step.rows, sampled, ending, states_EC, scores)

    def _feed_back(self, token_ids_T: torch.Tensor, step: StepLayout) -> None:
        """Decode rows go on from what they sampled last."""
        slots_D = step.decode_slots_D
        token_ids_T[: len(slots_D)] = self._last_tokens.index_select(0, slots_D)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=torch.int64), self._device)

    def _score_prompt(self, row: TokenRow, hidden_TC: torch.Tensor) -> list[_Scores]:
        """Log-probabilities of the prompt tokens that follow this chunk's positions."""
        bound = self._prompts[row.slot]
        assert bound.sampling is not None, "it took its slot"
        num_top = bound.sampling.top_logprobs or 0
        end = min(row.start + row.num_tokens, bound.num_prompt_tokens - 1)
        scores: list[_Scores] = []
        for first in range(row.start, end, PROMPT_LOGITS_ROWS):
            last = min(first + PROMPT_LOGITS_ROWS, end)
            logits_TV = self._model.logits(hidden_TC[first - row.start : last - row.start])
            next_ids = self._numbers(bound.history_ids[first + 1 : last + 1])
            logprobs = Logprobs.of(logits_TV, next_ids, num_top)
            scores.append(partial(logprobs.to_entries, [num_top] * (last - first)))
        return scores


def _results(
    rows: Sequence[TokenRow],
    sampled: TokenSamples | None,
    ending: Collection[int],
    states_EC: HostCopy | None,
    scores: Mapping[int, Sequence[_Scores]],
) -> tuple[TokenDelta, ...]:
    """One entry per row, after waiting for the device; those in `ending` slots yield states."""
    tokens = iter(sampled.to_results() if sampled else ())
    states = iter(() if states_EC is None else states_EC.get().numpy())
    results = []
    for row in rows:
        result = TokenDelta()
        if row.is_sampled and row.slot in ending:
            state_C = next(states)
            is_finite = bool(np.isfinite(state_C).all())
            result = TokenDelta(state=state_C.astype("<f4").tobytes(), is_finite=is_finite)
        elif row.is_sampled:
            result = next(tokens)
        if row.slot in scores:
            entries = chain.from_iterable(entries() for entries in scores[row.slot])
            result.prompt_logprobs = tuple(entries)
        results.append(result)
    return tuple(results)

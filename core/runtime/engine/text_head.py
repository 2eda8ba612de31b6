"""Text tokens: an embedding looked up in the model, one id sampled from its logits.

Owns each slot's last token, on the device, and the scores of prompts. Implements
`core.runtime.engine.token_runner.TokenHead`. It can drive any model that generates tokens over a
paged cache.

Shapes: T tokens of the step, R rows of logits, E rows that end, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob
from triptych.core.runtime.decoders.causal_model import PROMPT_LOGITS_ROWS, CausalModel
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.engine.token_runner import RowResults, StepLayout
from triptych.core.runtime.kernels.paged_attention import Int64s
from triptych.core.runtime.layers.adapters import AdapterRows
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.logprobs import Logprobs

_Scores = Callable[[], tuple[TokenLogprob, ...]]
"""Log-probabilities of some prompt tokens, on their way to the host."""


class TokenSamples(Protocol):
    """The tokens of a step: on the device for the next step, and on their way to the host."""

    @property
    def token_ids_B(self) -> torch.Tensor:  # noqa: N802 - a shape
        """One id per row."""
        ...

    def to_results(self) -> tuple[TokenDelta, ...]:
        """Wait for the copies and return one result per row."""
        ...


class TokenSampler(Protocol):
    """The sampler's interface as this head uses it; see `core.runtime.sampling.sampler.Sampler`."""

    def bind(self, row: TokenRow) -> None:
        """Take a slot for a row."""
        ...

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
        drafts: Sequence[int] = (),
        relaxed: Sequence[bool] = (),
    ) -> TokenSamples:
        """Sample one token per row; a slot with drafts has several."""
        ...


class TextHead:
    """Drives a `CausalModel` with a `Sampler`.

    In a model that reads another one's states, a token is `lag` positions after its cell.
    """

    lag = 0

    def __init__(
        self,
        model: CausalModel,
        sampler: TokenSampler,
        *,
        max_batch_size: int,
        device: torch.device,
        adapter_rows: AdapterRows | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._device = device
        self._last_tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.adapter_rows = adapter_rows
        """The rows' adapters, if the model takes any; set before the first step."""
        self._adapters_S = np.full(max_batch_size, -1, dtype=np.int64)
        self._prompts: dict[int, TokenRow] = {}  # slots that need prompt log-probabilities
        self._stateful: dict[int, tuple[int, ...]] = {}
        """By slot: the ids whose scores the row returns in place of a token; none: its state."""

    def bind(self, row: TokenRow) -> None:
        """Bind the slot's sampling state, and its prompt if that is scored."""
        assert row.sampling is not None, "the row starts in its slot"
        self._sampler.bind(row)
        self._adapters_S[row.slot] = row.adapter
        self._prompts.pop(row.slot, None)
        if row.sampling.prompt_logprobs:
            self._prompts[row.slot] = row
        self._stateful.pop(row.slot, None)
        if row.sampling.returns_state:
            self._stateful[row.slot] = row.sampling.state_token_ids

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """The prompt ids and, if the model takes adapters, the slot of each token's adapter."""
        return (step.token_ids_T, *self._lay_out_adapters(step))

    def _lay_out_adapters(self, step: StepLayout) -> tuple[Int64s, ...]:
        """The last part of a step's layout, if the model takes adapters."""
        if self.adapter_rows is None:
            return ()
        return (self._adapters_S[step.slots_B][step.row_T],)

    def _select_adapters(self, extras: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Choose the rows' adapters for the step; returns the other parts of its layout."""
        if self.adapter_rows is None:
            return extras
        self.adapter_rows.select(extras[-1])
        return extras[:-1]

    def places(self, step: StepLayout) -> Int64s:
        """The positions of a step's tokens as the model has them: [T], or [A, T] on axes."""
        return step.host_positions_T

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """Compute `hidden_TC`; the input of a decode row is its last sample."""
        token_ids_T = self._select_adapters(step.extras)[0]
        self._feed_back(token_ids_T, step)
        paged = PagedStep(kv, step.batch, step.states)
        return self._model.forward(token_ids_T, step.positions_T, paged)

    def sample(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """One token or state per sampled row, and the scores of prompts that asked for them."""
        scores: dict[int, list[_Scores]] = {}
        if self._prompts:
            scores = {
                row.slot: self._score_prompt(row, hidden_TC[first : first + row.num_tokens])
                for row, first in zip(step.rows, step.row_starts, strict=True)
                if row.slot in self._prompts and row.token_ids
            }
        places = [
            (row, num_after)
            for row in step.rows
            if row.is_sampled
            for num_after in range(row.num_drafts, -1, -1)
        ]
        index_R, slots_R = step.sampled_index_R, step.sampled_slots_R
        ending = {row.slot for row, _ in places if row.slot in self._stateful}
        states: _States | None = None
        if ending:
            # By index: a mask on the device would block.
            ended = [n for n, (row, _) in enumerate(places) if row.slot in ending]
            index_E = index_R.index_select(0, self._numbers(ended))
            hidden_EC = hidden_TC.index_select(0, index_E)
            states = self._states([places[n][0].slot for n in ended], hidden_EC)
            others = [n for n, (row, _) in enumerate(places) if row.slot not in ending]
            places, of_others = [places[n] for n in others], self._numbers(others)
            index_R, slots_R = (x.index_select(0, of_others) for x in (index_R, slots_R))
        sampled = None
        if places:
            hidden_RC = hidden_TC.index_select(0, index_R)
            logits_RV = self._logits(hidden_RC, [row.slot for row, _ in places])
            sampled = self._sampler.sample(
                logits_RV,
                [row.slot for row, _ in places],
                [row.start + row.num_tokens - num_after + self.lag for row, num_after in places],
                [row.allowed_after(row.num_drafts - num_after) for row, num_after in places],
                _next_drafts(places),
                _are_relaxed(places),
            )
            # A row with drafts brings its next input itself.
            self._last_tokens.index_copy_(0, slots_R, sampled.token_ids_B)
        return partial(_results, step.rows, sampled, ending, states, scores)

    def _states(self, slots: Sequence[int], hidden_EC: torch.Tensor) -> _States:
        """The states of rows that end, or their scores of the ids that they ask for."""
        wanted = [self._stateful[slot] for slot in slots]
        if any(wanted):
            logits_EV = self._logits(hidden_EC, slots)
            parts = [
                logits_EV[row].index_select(0, self._numbers(ids)) if ids else hidden_EC[row]
                for row, ids in enumerate(wanted)
            ]
        else:
            parts = list(hidden_EC)
        values = HostCopy(torch.cat([part.float() for part in parts]))
        return _States(values, [len(part) for part in parts])

    def _logits(self, hidden_RC: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """The logits of rows in these slots."""
        if self.adapter_rows is not None:
            self.adapter_rows.select(self._numbers(self._adapters_S[slots].tolist()))
        return self._model.logits(hidden_RC)

    def _feed_back(self, token_ids_T: torch.Tensor, step: StepLayout) -> None:
        """Fill in each decode row's last sample as its input."""
        slots_D = step.decode_slots_D
        token_ids_T[: len(slots_D)] = self._last_tokens.index_select(0, slots_D)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)

    def _score_prompt(self, row: TokenRow, hidden_TC: torch.Tensor) -> list[_Scores]:
        """Log-probabilities of the prompt tokens that follow this chunk's positions."""
        bound = self._prompts[row.slot]
        assert bound.sampling is not None, "the row has started in its slot"
        num_top = bound.sampling.top_logprobs or 0
        end = min(row.start + row.num_tokens, bound.num_prompt_tokens - 1)
        scores: list[_Scores] = []
        for first in range(row.start, end, PROMPT_LOGITS_ROWS):
            last = min(first + PROMPT_LOGITS_ROWS, end)
            scored_TC = hidden_TC[first - row.start : last - row.start]
            logits_TV = self._logits(scored_TC, [row.slot] * (last - first))
            next_ids = self._numbers(bound.history_ids[first + 1 : last + 1])
            logprobs = Logprobs.of(logits_TV, next_ids, num_top)
            scores.append(partial(logprobs.to_entries, [num_top] * (last - first)))
        return scores


@dataclass(frozen=True, slots=True)
class _States:
    """The values that some rows return in place of a token, one row after the other."""

    values: HostCopy
    sizes: Sequence[int]

    def read(self) -> Iterator[npt.NDArray[np.float32]]:
        """Wait for the values of each row."""
        ends = np.cumsum(self.sizes)[:-1]
        yield from np.split(self.values.get().numpy(), ends)


def _results(
    rows: Sequence[TokenRow],
    sampled: TokenSamples | None,
    ending: Collection[int],
    states: _States | None,
    scores: Mapping[int, Sequence[_Scores]],
) -> tuple[TokenDelta, ...]:
    """One entry per row, after waiting for the device; rows in `ending` slots yield states."""
    found = sampled.to_results() if sampled else ()
    if len(found) == len(rows) and all(row.is_sampled for row in rows) and not (ending or scores):
        return found
    tokens = iter(found)
    returned = iter(() if states is None else states.read())
    results = []
    for row in rows:
        result = TokenDelta()
        if row.is_sampled and row.slot in ending:
            state_C = next(returned)
            is_finite = bool(np.isfinite(state_C).all())
            result = TokenDelta(state=state_C.astype("<f4").tobytes(), is_finite=is_finite)
        elif row.is_sampled:
            result = next(tokens)
            if row.num_drafts:
                result = _verified(row, [result, *islice(tokens, row.num_drafts)])
        if row.slot in scores:
            entries = chain.from_iterable(entries() for entries in scores[row.slot])
            result.prompt_logprobs = tuple(entries)
        results.append(result)
    return tuple(results)


def _next_drafts(places: Sequence[tuple[TokenRow, int]]) -> list[int]:
    """The draft that follows each place, -1 for none; empty without any."""
    if not any(num_after for _, num_after in places):
        return []
    return [row.token_ids[-num_after] if num_after else -1 for row, num_after in places]


def _are_relaxed(places: Sequence[tuple[TokenRow, int]]) -> list[bool]:
    """Whether the draft that follows each place may count by the relaxed rule; empty without."""
    if not any(row.num_relaxed for row, _ in places):
        return []
    return [row.num_drafts - num_after < row.num_relaxed for row, num_after in places]


def _verified(row: TokenRow, results: Sequence[TokenDelta]) -> TokenDelta:
    """The result of a row with drafts: its tokens up to the first that was not drafted.

    What was computed after a wrong draft is of no use, nor is it wrong that it is not finite.
    """
    drafts = row.token_ids[-row.num_drafts :]
    pairs = zip(results, drafts, strict=False)
    num_right = sum(1 for _ in takewhile(lambda pair: pair[0].token_ids == (pair[1],), pairs))
    results = results[: num_right + 1]
    return TokenDelta(
        token_ids=tuple(chain.from_iterable(result.token_ids for result in results)),
        logprobs=tuple(chain.from_iterable(result.logprobs for result in results)),
        is_finite=all(result.is_finite for result in results),
    )

"""Turns token plans into device work: one forward and one draw per plan.

Owns what a batch slot keeps between steps: its page table (on the host), and its last sampled
token (on the device, so that the next plan can be launched before this one is read). Knows no
policy: which rows run, and on which pages, is the scheduler's word. Any model that writes tokens
over a paged cache can be driven by it.

Shapes: T tokens of the step, B rows, R sampled rows, M pages per row, C hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from triptych.core.errors import OutOfMemory
from triptych.core.kernels.paged_attention import AttentionBatch, Int64s
from triptych.core.layers.attention import KvCache
from triptych.core.plan import (
    Plan,
    SlotStart,
    TokenPlan,
    TokenRow,
    TokenRowResult,
    TokenStepResult,
)
from triptych.core.sampling.logprobs import Logprobs
from triptych.core.sampling.sampler import SampledTokens, Sampler
from triptych.core.tokens import TokenLogprob

_PROMPT_LOGITS_ROWS = 128  # positions scored at once for prompt log-probabilities


class CausalModel(Protocol):
    """What the runner asks of a model; `core.layers.decoder.Decoder` is the usual one."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    def forward(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv: KvCache,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """`hidden_TC`."""
        ...

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """`logits_RV`."""
        ...


class TokenRunner:
    """Implements `core.plan.Runner` for `TokenPlan`s."""

    def __init__(
        self,
        model: CausalModel,
        kv: KvCache,
        sampler: Sampler,
        *,
        max_batch_size: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        page_size = kv.layout.page_size
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._device = device
        self._page_size = page_size
        self._page_table = np.zeros((max_batch_size, -(-max_length // page_size)), dtype=np.int64)
        self._num_pages = np.zeros(max_batch_size, dtype=np.int64)
        self._last_tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._prompts: dict[int, SlotStart] = {}  # slots that want prompt log-probabilities

    def launch(self, plan: Plan) -> PendingTokens:
        """Start `plan`; on a CPU the work is done when this returns.

        Raises `OutOfMemory` when the device has no room for the step; the cache is unharmed.
        """
        assert isinstance(plan, TokenPlan)
        self._update_page_tables(plan)
        try:
            with torch.inference_mode(), _current(self._device):
                clock = _DeviceClock(self._device)
                step = self._run(plan)
                clock.stop()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The step did not fit in device memory.") from error
        return PendingTokens(plan, step, clock)

    def close(self) -> None:
        """Let go of the model and the cache; there is no launching after this."""
        del self._model, self._kv, self._sampler

    def _run(self, plan: TokenPlan) -> _Step:
        for start in plan.starts:
            self._bind(start)
        inputs = self._prepare(plan.rows)
        hidden_TC = self._model.forward(
            inputs.token_ids_T, inputs.positions_T, self._kv, inputs.batch
        )
        prompt_logprobs = {
            index: self._score_prompt(row, hidden_TC[first : first + row.num_tokens])
            for index, (row, first) in enumerate(zip(plan.rows, inputs.row_starts, strict=True))
            if row.slot in self._prompts and row.token_ids
        }
        rows = [row for row in plan.rows if row.is_sampled]
        if not rows:
            return _Step(None, prompt_logprobs)
        logits_RV = self._model.logits(hidden_TC.index_select(0, inputs.sampled_index_R))
        slots = [row.slot for row in rows]
        sampled = self._sampler.sample(
            logits_RV, slots, [row.start + row.num_tokens for row in rows]
        )
        self._last_tokens.index_copy_(0, inputs.sampled_slots_R, sampled.token_ids_B)
        return _Step(sampled, prompt_logprobs)

    def _bind(self, start: SlotStart) -> None:
        self._sampler.bind(start)
        self._prompts.pop(start.slot, None)
        if start.sampling.prompt_logprobs:
            self._prompts[start.slot] = start

    def _update_page_tables(self, plan: TokenPlan) -> None:
        """Comes before anything that can fail: the next plan's rows would write astray."""
        for start in plan.starts:
            self._num_pages[start.slot] = 0
        for row in plan.rows:
            if row.new_page_ids:
                first = self._num_pages[row.slot]
                last = first + len(row.new_page_ids)
                self._page_table[row.slot, first:last] = row.new_page_ids
                self._num_pages[row.slot] = last

    def _prepare(self, rows: Sequence[TokenRow]) -> _Inputs:
        """Lay the step out on the host, vectorised, and bring it over in one copy."""
        shape = np.array([(r.slot, r.start, r.num_tokens, r.is_sampled) for r in rows])
        slots_B, starts_B, lengths_B, is_sampled_B = shape.T.astype(np.int64)
        contexts_B = starts_B + lengths_B
        num_decode = sum(not row.token_ids for row in rows)
        assert not any(row.token_ids for row in rows[:num_decode]), "decode rows come first"
        assert (lengths_B[:num_decode] == 1).all()
        query_starts_B = np.cumsum(lengths_B) - lengths_B

        row_T = np.repeat(np.arange(len(rows)), lengths_B)
        positions_T = np.arange(len(row_T)) - (query_starts_B - starts_B)[row_T]
        pages_T = self._page_table[slots_B[row_T], positions_T // self._page_size]
        write_slots_T = pages_T * self._page_size + positions_T % self._page_size
        prompt_ids = chain.from_iterable(row.token_ids for row in rows)
        token_ids_T = np.zeros(len(row_T), dtype=np.int64)
        token_ids_T[num_decode:] = np.fromiter(prompt_ids, dtype=np.int64)
        sampled = is_sampled_B.astype(bool)
        max_pages = -(-int(contexts_B.max()) // self._page_size)
        page_table_BM = self._page_table[slots_B, :max_pages]

        host = (
            token_ids_T,
            positions_T,
            write_slots_T,
            slots_B,
            contexts_B,
            query_starts_B,
            (query_starts_B + lengths_B - 1)[sampled],
            slots_B[sampled],
            page_table_BM,
        )
        tokens, positions, writes, slots, contexts, starts, index, sampled_slots, table = (
            _to_device(host, self._device)
        )
        decode_ids = self._last_tokens.index_select(0, slots[:num_decode])
        tokens[:num_decode] = decode_ids
        batch = AttentionBatch(
            page_table_BM=table.view(page_table_BM.shape),
            context_lengths_B=contexts,
            query_starts_B=starts,
            write_slots_T=writes,
            num_decode_rows=num_decode,
            host_query_lengths_B=lengths_B,
            host_context_lengths_B=contexts_B,
            native=self._kv.native,
        )
        return _Inputs(tokens, positions, index, sampled_slots, query_starts_B.tolist(), batch)

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
class _Inputs:
    """A step's tensors on the device. `row_starts` is the first token of each row."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    sampled_index_R: torch.Tensor
    sampled_slots_R: torch.Tensor
    row_starts: list[int]
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-probabilities of some prompt tokens, and how many alternatives each reports."""

    logprobs: Logprobs
    num_top: list[int]

    def entries(self) -> tuple[TokenLogprob, ...]:
        return self.logprobs.to_entries(self.num_top)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a launched step will yield: a draw for its sampled rows, scores by row index."""

    sampled: SampledTokens | None
    prompt_scores: dict[int, list[_Scores]]


class PendingTokens:
    """Implements `core.plan.PendingStep`: the device may still be at work."""

    __slots__ = ("_clock", "_plan", "_step")

    def __init__(self, plan: TokenPlan, step: _Step, clock: _DeviceClock) -> None:
        self._plan = plan
        self._step = step
        self._clock = clock

    def result(self) -> TokenStepResult:
        """Wait for this step alone, not for those launched since."""
        sampled = iter(self._step.sampled.to_results() if self._step.sampled else ())
        rows = tuple(
            self._with_scores(index, next(sampled) if row.is_sampled else TokenRowResult())
            for index, row in enumerate(self._plan.rows)
        )
        elapsed_s = self._clock.elapsed_s()
        return TokenStepResult(step_id=self._plan.step_id, elapsed_s=elapsed_s, rows=rows)

    def _with_scores(self, index: int, row: TokenRowResult) -> TokenRowResult:
        scores = self._step.prompt_scores.get(index)
        if scores is None:
            return row
        entries = tuple(chain.from_iterable(score.entries() for score in scores))
        return replace(row, prompt_logprobs=entries)


class _DeviceClock:
    """Time from launch to the end of the work, on the device that does it."""

    __slots__ = ("_end", "_ended_s", "_start", "_started_s")

    def __init__(self, device: torch.device) -> None:
        self._start = self._end = None
        if device.type == "cuda":
            self._start = torch.Event(device, enable_timing=True)
            self._end = torch.Event(device, enable_timing=True)
            self._start.record()
        self._started_s = self._ended_s = time.perf_counter()

    def stop(self) -> None:
        """The last of the step's work has been launched."""
        self._ended_s = time.perf_counter()
        if self._end is not None:
            self._end.record()

    def elapsed_s(self) -> float:
        """Waits for the step."""
        if self._start is None or self._end is None:
            return self._ended_s - self._started_s
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


def _current(device: torch.device) -> AbstractContextManager[object]:
    """A block in which `device` is the thread's current GPU; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _to_device(arrays: Sequence[Int64s], device: torch.device) -> Sequence[torch.Tensor]:
    """Flat int64 arrays in one copy; pinned, so that it does not wait for the device."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    sizes = [array.size for array in arrays]
    return packed.tensor_split(np.cumsum(sizes)[:-1].tolist())

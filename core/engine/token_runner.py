"""Turns token plans into device work: one forward and one draw per plan.

Owns what every batch slot keeps between steps, its page table (on the host), and how a step is
laid out. Knows no policy: the scheduler chooses which rows run, and on which pages. Nor does it
know what a token is: a `TokenHead` decides what goes into the model and what is drawn from it
(`core.engine.text_head`, and heads of modalities whose tokens are frames), and keeps each slot's
last draw on the device, so that the next plan can be launched before this one is read.

Shapes: T tokens of the step, B rows, D decode rows, R sampled rows, M pages per row, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from triptych.core.devices.device import end_of_work, on_device
from triptych.core.errors import OutOfMemory
from triptych.core.kernels.paged_attention import AttentionBatch, Int64s
from triptych.core.layers.attention import KvCache
from triptych.core.plan import Plan, SlotStart, StepResult, TokenPlan, TokenRow, TokenRowResult


@dataclass(slots=True)
class StepLayout:
    """A step: its rows one after the other, decode rows first.

    First it is laid out on the host: `token_ids_T` holds the prompt chunks' ids; those of the first
    `num_decode` tokens are not known here, and 0. `row_T` is the row of each token, `row_starts`
    each row's first token. The fields after `row_starts` are on the device, and are there from then
    on when all is brought over; `extras` are the head's.
    """

    rows: Sequence[TokenRow]
    num_decode: int
    token_ids_T: Int64s
    host_positions_T: Int64s
    row_T: Int64s
    slots_B: Int64s
    row_starts: Sequence[int]
    positions_T: torch.Tensor = field(init=False)
    decode_slots_D: torch.Tensor = field(init=False)
    sampled_index_R: torch.Tensor = field(init=False)
    sampled_slots_R: torch.Tensor = field(init=False)
    extras: Sequence[torch.Tensor] = field(init=False)
    batch: AttentionBatch = field(init=False)


RowResults = Callable[[], tuple[TokenRowResult, ...]]
"""Waits for a step, not for those launched since: one entry per row of its plan."""


class TokenHead(Protocol):
    """What a token is to a model: how positions are embedded, and how the next one is drawn.

    Keeps per slot, on the device, what was drawn last. Called from the runner's thread, in the
    order of the methods here.
    """

    def bind(self, start: SlotStart) -> None:
        """A row takes a slot."""
        ...

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """What this head needs on the device beside the runner's own: it comes as `extras`."""
        ...

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """`hidden_TC` of every token."""
        ...

    def draw(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """Draw for the sampled rows, and note the draws for the next step."""
        ...


class TokenRunner:
    """Implements `core.plan.Runner` for `TokenPlan`s."""

    def __init__(
        self,
        head: TokenHead,
        kv: KvCache,
        *,
        max_batch_size: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        page_size = kv.layout.page_size
        self._head = head
        self._kv = kv
        self._device = device
        self._page_size = page_size
        self._page_table = np.zeros((max_batch_size, -(-max_length // page_size)), dtype=np.int64)
        self._num_pages = np.zeros(max_batch_size, dtype=np.int64)

    def launch(self, plan: Plan) -> PendingTokens:
        """Start `plan`; on a CPU the work is done when this returns.

        Raises `OutOfMemory` when the device has no room for the step; the cache is unharmed.
        """
        assert isinstance(plan, TokenPlan)
        self._update_page_tables(plan)
        try:
            with torch.inference_mode(), on_device(self._device):
                for start in plan.starts:
                    self._head.bind(start)
                step = self._prepare(plan.rows)
                results = self._head.draw(step, self._head.forward(step, self._kv))
                wait = end_of_work(self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The step did not fit in device memory.") from error
        return PendingTokens(results, wait)

    def close(self) -> None:
        """Let go of the model and the cache; there is no launching after this."""
        del self._head, self._kv

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

    def _prepare(self, rows: Sequence[TokenRow]) -> StepLayout:
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

        row_starts = query_starts_B.tolist()
        step = StepLayout(rows, num_decode, token_ids_T, positions_T, row_T, slots_B, row_starts)
        host = (
            positions_T,
            slots_B[:num_decode],
            (query_starts_B + lengths_B - 1)[sampled],
            slots_B[sampled],
            write_slots_T,
            contexts_B,
            query_starts_B,
            page_table_BM,
            *self._head.lay_out(step),
        )
        tensors = _to_device(host, self._device)
        step.positions_T, step.decode_slots_D, step.sampled_index_R, *tensors = tensors
        step.sampled_slots_R, write_slots, contexts, query_starts, table, *step.extras = tensors
        step.batch = AttentionBatch(
            page_table_BM=table.view(page_table_BM.shape),
            context_lengths_B=contexts,
            query_starts_B=query_starts,
            write_slots_T=write_slots,
            num_decode_rows=num_decode,
            host_query_lengths_B=lengths_B,
            host_context_lengths_B=contexts_B,
            native=self._kv.native,
        )
        return step


class PendingTokens:
    """Implements `core.plan.PendingStep`: the device may still be at work."""

    __slots__ = ("_results", "_wait")

    def __init__(self, results: RowResults, wait: Callable[[], None]) -> None:
        self._results = results
        self._wait = wait

    def result(self) -> StepResult:
        """Wait for this step alone, not for those launched since."""
        rows = self._results()
        self._wait()
        return StepResult(rows=rows)


def _to_device(arrays: Sequence[Int64s], device: torch.device) -> Sequence[torch.Tensor]:
    """Flat int64 arrays in one copy; pinned, so that it does not wait for the device."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    sizes = [array.size for array in arrays]
    return packed.tensor_split(np.cumsum(sizes)[:-1].tolist())

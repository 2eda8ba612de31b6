"""Turns token plans into device work: one forward and one sample per plan.

Owns the page tables of every batch slot (on the host), and the layout of a step. Knows no policy:
the scheduler chooses which rows run, and on which pages. Does not know what a token is: a
`TokenHead` decides what goes into the model and what is sampled from it
(`core.runtime.engine.text_head`, and heads of modalities whose tokens are frames), and keeps each
slot's last sample on the device, so that the next plan can be launched before this one is read.

Steps may be captured (`core.runtime.graphs`): padding rows continue from slot 0's token, at
position 0 of a page that no row leases, and their results are dropped. In steps with prompt chunks,
a chunk of padding takes the tokens left over; there, padding sees no keys.

Shapes: T tokens of the step, B rows, D decode rows, R sampled rows, M pages per row, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from triptych.core.engine_api.plan import Plan, StepResult, TokenPlan, TokenRow
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.errors import OutOfMemory
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.devices.upload import Uploads
from triptych.core.runtime.engine.step_states import StepStates
from triptych.core.runtime.engine.window_table import WindowTable
from triptych.core.runtime.graphs.backend import Tensors
from triptych.core.runtime.graphs.buckets import Bucket
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.kernels.attention_backends import TRITON
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, Int64s
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.layers.states import StateBatch

_PADDING = TokenRow(job_id="", slot=-1, start=0, num_tokens=1, is_sampled=False)
"""A row that pads a bucket: its slot is the last line of the page table."""
_NO_CHUNK = TokenRow(job_id="", slot=-1, start=0, num_tokens=0, is_sampled=False)
_CONTEXTS = 5  # the place of the contexts' lengths among the arrays of a step


@dataclass(slots=True)
class StepLayout:
    """A step: its rows one after the other, decode rows first.

    It is first laid out on the host: `token_ids_T` holds the prompt chunks' ids; those of the first
    `num_decode` tokens are unknown there, and 0. `row_T` is the row of each token, `row_starts`
    each row's first token, `lengths_B` its number of tokens, `contexts_B` the position where it
    ends. The remaining fields are on the device and are set by the upload; `extras` are the head's,
    `states` those of a model with recurrent layers.
    """

    rows: Sequence[TokenRow]
    num_decode: int
    token_ids_T: Int64s
    host_positions_T: Int64s
    row_T: Int64s
    slots_B: Int64s
    row_starts: Sequence[int]
    lengths_B: Int64s
    contexts_B: Int64s
    positions_T: torch.Tensor = field(init=False)
    decode_slots_D: torch.Tensor = field(init=False)
    sampled_index_R: torch.Tensor = field(init=False)
    sampled_slots_R: torch.Tensor = field(init=False)
    extras: Sequence[torch.Tensor] = field(init=False)
    batch: AttentionBatch = field(init=False)
    states: StateBatch | None = None


RowResults = Callable[[], tuple[TokenDelta, ...]]
"""Waits for this step, not for later ones, and returns one entry per row of its plan."""


class TokenHead(Protocol):
    """The model's view of a token: how positions are embedded, and how the next one is sampled.

    Keeps each slot's last sample on the device. Called from the runner's thread, in the order of
    the methods here.
    """

    def bind(self, row: TokenRow) -> None:
        """Start a row in its slot."""
        ...

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """The arrays that this head also needs on the device; they come back as `extras`."""
        ...

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """Compute `hidden_TC` of every token."""
        ...

    def sample(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """Sample for the sampled rows, and keep the samples for the next step."""
        ...


class TokenRunner:
    """Implements `core.engine_api.plan.Runner` for `TokenPlan`s.

    With `graphs`, padding rows write to the last page before the cache's null page. If
    `is_deterministic`, attention sums in an order that does not depend on the batch;
    `attention_backend` are the kernels that it uses on a GPU.
    """

    is_deterministic = False
    attention_backend = TRITON

    def __init__(
        self,
        head: TokenHead,
        kv: KvCache,
        *,
        max_batch_size: int,
        max_length: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        page_size = kv.layout.page_size
        self._head = head
        self._kv = kv
        self._device = device
        self._page_size = page_size
        shape = (max_batch_size + 1, -(-max_length // page_size))
        self._page_table = np.zeros(shape, dtype=np.int64)
        self._page_table[-1] = kv.num_pages - 2
        self._num_pages = np.zeros(max_batch_size, dtype=np.int64)
        self._windows: WindowTable | None = None
        if any(kv.windowed):
            self._windows = WindowTable(shape, kv.num_window_pages)
        self._graphs = graphs
        self._states = None if kv.states is None else StepStates(kv.states, max_batch_size)
        self._uploads = Uploads(device)
        self.stream = StepStream(device, is_urgent=True)

    @property
    def head(self) -> TokenHead:
        """The model's view of a token."""
        return self._head

    @property
    def kv(self) -> KvCache:
        """The cache that steps read and write."""
        return self._kv

    def places(self, slots_T: Int64s, positions_T: Int64s) -> Int64s:
        """The places of positions, which running rows have computed, in the cache's pages."""
        return self._write_slots(self._page_table, slots_T, positions_T)

    def launch(self, plan: Plan) -> PendingTokens:
        """Start `plan`; on a CPU it is complete when this returns.

        Raises `OutOfMemory` when the device has no room for the step; the cache is unharmed.
        """
        assert isinstance(plan, TokenPlan)
        self._update_page_tables(plan)
        try:
            with torch.inference_mode(), self.stream.current():
                for row in plan.starts:
                    self._head.bind(row)
                if self._states is not None:
                    self._states.begin(plan.rows)
                step, hidden_TC = self._compute(plan.rows)
                if self._states is not None:
                    self._states.end(plan.rows)
                results = self._head.sample(step, hidden_TC)
                wait = end_of_work(self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The step did not fit in device memory.") from error
        return PendingTokens(results, wait)

    def capture(self) -> None:
        """Capture decode steps of every size now, on padding rows only, and keep them."""
        if self._graphs is not None:
            steps, spare_bytes = self._graphs.steps, self._graphs.spare_bytes
            with (
                torch.inference_mode(),
                self.stream.current(),
                steps.ahead(spare_bytes=spare_bytes),
            ):
                for bucket in self._graphs.buckets.all():
                    self._replay((), bucket)

    def close(self) -> None:
        """Release the model and the cache. No launches after this."""
        del self._head, self._kv, self._graphs

    def _update_page_tables(self, plan: TokenPlan) -> None:
        """Must run before anything that can raise, or later rows would write to wrong pages."""
        for row in plan.rows:
            if self._windows is not None:
                self._windows.update(row)
            if row.sampling is not None:
                self._num_pages[row.slot] = 0
            if row.new_page_ids:
                first = self._num_pages[row.slot]
                last = first + len(row.new_page_ids)
                self._page_table[row.slot, first:last] = row.new_page_ids
                self._num_pages[row.slot] = last

    def _compute(self, rows: Sequence[TokenRow]) -> tuple[StepLayout, torch.Tensor]:
        """The step's layout and `hidden_TC`: replayed where possible."""
        last = max([row.start + row.num_tokens for row in rows]) - 1
        num_pages = 1 + last // self._page_size
        num_decode = sum([not row.token_ids for row in rows])
        if self._graphs is not None:
            bucket = self._bucket(rows, num_decode, num_pages)
            if bucket is not None and (replayed := self._replay(rows, bucket)) is not None:
                return replayed
        step, host = self._lay_out(rows, num_pages, num_decode)
        self._attach(step, self._uploads.send(host))
        return step, self._head.forward(step, self._kv)

    def _bucket(self, rows: Sequence[TokenRow], num_decode: int, num_pages: int) -> Bucket | None:
        """The captured size that holds the rows, if any."""
        assert self._graphs is not None
        if num_decode == len(rows):
            return self._graphs.buckets.fit(num_decode, num_pages)
        if self._graphs.prompts is None or self._states is not None:
            return None
        if any(row.num_drafts for row in rows):  # they sample more than a bucket has room for
            return None
        num_tokens = sum(row.num_tokens for row in rows[num_decode:])
        return self._graphs.prompts.fit(num_decode, len(rows) - num_decode, num_tokens, num_pages)

    def _replay(
        self, rows: Sequence[TokenRow], bucket: Bucket
    ) -> tuple[StepLayout, torch.Tensor] | None:
        """As `_compute`, in a bucket; `None` where it is not captured."""
        assert self._graphs is not None
        padded, is_real_B = _padded(rows, bucket)
        step, host = self._lay_out(padded, bucket.pages, bucket.decode_rows)
        num_sampled = len(host[2])
        host = [*host[:2], *(_widened(each, bucket.rows) for each in host[2:4]), *host[4:]]
        if bucket.chunks:
            step.contexts_B *= is_real_B
        ends = np.cumsum([array.size for array in host])[:-1].tolist()
        body = partial(self._forward_static, step, bucket, ends)
        states = () if self._states is None else self._states.views(rows)
        outputs = self._graphs.steps.run(bucket, body, [self._uploads.pack(host)], states)
        if outputs is None:
            return None
        hidden_TC, step.positions_T, index_R, slots_R = outputs
        step.sampled_index_R, step.sampled_slots_R = index_R[:num_sampled], slots_R[:num_sampled]
        step.rows = rows
        step.row_starts = [*compress(step.row_starts, is_real_B.tolist())]
        return step, hidden_TC

    def _forward_static(
        self, step: StepLayout, bucket: Bucket, ends: list[int], inputs: Tensors
    ) -> Tensors:
        """`hidden_TC` of a step that lies in `inputs`, and the tensors that its samples need.

        On a GPU, launch for the longest possible rows, so that the graph can be replayed.
        """
        static = copy(step)
        tensors = inputs[0].tensor_split(ends)
        contexts_B = tensors[_CONTEXTS]
        most = np.full(bucket.rows, bucket.pages * self._page_size)
        static.contexts_B = contexts_B.numpy() if contexts_B.is_cpu else most
        self._attach(static, tensors)
        hidden_TC = self._head.forward(static, self._kv)
        return hidden_TC, static.positions_T, static.sampled_index_R, static.sampled_slots_R

    def _lay_out(
        self, rows: Sequence[TokenRow], num_pages: int, num_decode: int
    ) -> tuple[StepLayout, Sequence[Int64s]]:
        """The step on the host, vectorized, and the arrays that the device needs."""
        shape = [n for r in rows for n in (r.slot, r.start, r.num_tokens, _num_sampled(r))]
        shape_4B = np.array(shape, dtype=np.int64).reshape(-1, 4).T.copy()
        lines_B, starts_B, lengths_B, num_sampled_B = shape_4B
        slots_B = np.maximum(lines_B, 0)
        contexts_B = starts_B + lengths_B
        assert not any(row.token_ids for row in rows[:num_decode]), "decode rows come first"
        assert (lengths_B[:num_decode] == 1).all()
        query_starts_B = np.cumsum(lengths_B) - lengths_B

        row_T = np.repeat(np.arange(len(rows)), lengths_B)
        positions_T = np.arange(len(row_T)) - (query_starts_B - starts_B)[row_T]
        prompt_ids = chain.from_iterable([row.token_ids for row in rows[num_decode:]])
        token_ids_T = np.zeros(len(row_T), dtype=np.int64)
        token_ids_T[num_decode:] = np.fromiter(prompt_ids, dtype=np.int64)
        ends_R = np.repeat(query_starts_B + lengths_B, num_sampled_B)
        places_R = np.arange(len(ends_R)) - np.repeat(np.cumsum(num_sampled_B), num_sampled_B)

        step = StepLayout(
            rows=rows,
            num_decode=num_decode,
            token_ids_T=token_ids_T,
            host_positions_T=positions_T,
            row_T=row_T,
            slots_B=slots_B,
            row_starts=query_starts_B.tolist(),
            lengths_B=lengths_B,
            contexts_B=contexts_B,
        )
        return step, (
            positions_T,
            slots_B[:num_decode],
            ends_R + places_R,
            np.repeat(slots_B, num_sampled_B),
            self._write_slots(self._page_table, lines_B[row_T], positions_T),
            contexts_B,
            query_starts_B,
            self._page_table[lines_B, :num_pages],
            *self._window_arrays(lines_B, row_T, positions_T, num_pages),
            self._state_lines(rows),
            *self._head.lay_out(step),
        )

    def _write_slots(self, table: Int64s, lines_T: Int64s, positions_T: Int64s) -> Int64s:
        """The place of each token in pages of `table`."""
        pages_T = table[lines_T, positions_T // self._page_size]
        return pages_T * self._page_size + positions_T % self._page_size

    def _window_arrays(
        self, lines_B: Int64s, row_T: Int64s, positions_T: Int64s, num_pages: int
    ) -> tuple[Int64s, ...]:
        """The places of tokens, and the rows' tables, in pages of layers with a window, if any."""
        if self._windows is None:
            return ()
        table = self._windows.table
        slots_T = self._write_slots(table, lines_B[row_T], positions_T)
        return slots_T, table[lines_B, :num_pages]

    def _state_lines(self, rows: Sequence[TokenRow]) -> Int64s:
        """The lines of the rows' states, none in a model without states."""
        lines = [] if self._states is None else self._states.lines(rows)
        return np.array(lines, dtype=np.int64)

    def _attach(self, step: StepLayout, tensors: Sequence[torch.Tensor]) -> None:
        """Point the step at the arrays of `_lay_out`, on the device."""
        step.positions_T, step.decode_slots_D, step.sampled_index_R, *tensors = tensors
        step.sampled_slots_R, write_slots, contexts, query_starts, table, *tensors = tensors
        num_own = 0 if self._windows is None else 2
        window, tensors = tensors[:num_own], tensors[num_own:]
        state_lines, *step.extras = tensors
        if self._states is not None:
            step.states = self._states.batch(step.rows, state_lines)
        step.batch = AttentionBatch(
            page_table_BM=table.view(len(contexts), -1),
            context_lengths_B=contexts,
            query_starts_B=query_starts,
            write_slots_T=write_slots,
            num_decode_rows=step.num_decode,
            host_query_lengths_B=step.lengths_B,
            host_context_lengths_B=step.contexts_B,
            native=self._kv.native,
            is_deterministic=self.is_deterministic,
            backend=self.attention_backend,
        )
        if window:
            step.batch.windowed = replace(
                step.batch,
                write_slots_T=window[0],
                page_table_BM=window[1].view(len(contexts), -1),
                groups={},
            )


def _num_sampled(row: TokenRow) -> int:
    """The number of positions at which a row samples: its last ones."""
    return 1 + row.num_drafts if row.is_sampled else 0


def _padded(
    rows: Sequence[TokenRow], bucket: Bucket
) -> tuple[Sequence[TokenRow], NDArray[np.bool_]]:
    """The rows of a bucket, and which of them are not padding."""
    if not bucket.chunks:
        padding = [_PADDING] * (bucket.rows - len(rows))
        return [*rows, *padding], np.arange(bucket.rows) < len(rows)
    num_decode = sum(not row.token_ids for row in rows)
    decode, chunks = rows[:num_decode], rows[num_decode:]
    num_left = bucket.tokens - bucket.decode_rows - sum(row.num_tokens for row in chunks)
    left = structs.replace(_NO_CHUNK, num_tokens=num_left, token_ids=(0,) * num_left)
    padded = [
        *(*decode, *[_PADDING] * (bucket.decode_rows - num_decode)),
        *(*chunks, left, *[_NO_CHUNK] * (bucket.chunks - len(chunks) - 1)),
    ]
    return padded, np.array([row.slot >= 0 for row in padded])


def _widened(array: Int64s, size: int) -> Int64s:
    """The array with zeros at its end."""
    wide = np.zeros(size, dtype=array.dtype)
    wide[: len(array)] = array
    return wide


class PendingTokens:
    """Implements `core.engine_api.plan.PendingStep`: the device may still be working."""

    __slots__ = ("_results", "_wait")

    def __init__(self, results: RowResults, wait: Callable[[], None]) -> None:
        self._results = results
        self._wait = wait

    def result(self) -> StepResult:
        """Wait for this step alone, not for those launched since."""
        self._wait()
        return StepResult(rows=self._results())

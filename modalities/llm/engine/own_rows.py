"""Rows of a step through a class of transformers with the class's own cache.

Owns how the cache object of a row comes from pages and a state, and goes back to them
(`own_cache`). Each row runs by itself, as in `rows`, and no object outlives a step. Knows neither
configurations nor checkpoints.

Shapes: T tokens, C hidden, S entries, E values of an entry, L cells, W values of a cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.kv_pages import read_cells, write_cells
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.states import RowStates
from triptych.modalities.llm.engine.bridge import refusal
from triptych.modalities.llm.engine.own_cache import (
    CacheTensor,
    OwnCache,
    Path,
    parts_of,
    with_parts,
)
from triptych.modalities.llm.engine.rows import MAX_TOKENS, RunRow

_MOST_COPIES = 4
"""Copies of a row's cache while it runs: read from pages, extended, and as attention takes it."""


def own_row_bytes(plan: OwnCache, num_heads: int, max_length: int) -> int:
    """The most memory that a row takes while it runs: copies of its cache, and scores twice."""
    score_bytes = 2 * num_heads * MAX_TOKENS * max_length * torch.float32.itemsize
    return _MOST_COPIES * plan.num_bytes(max_length) + score_bytes


class _RowPiece(NamedTuple):
    """Tokens `start .. stop - 1` of a step, all of one row, after `num_past` others of it.

    If it `ends`, the row's cache is stored after them, and its state in `line`, too, if that is not
    -1.
    """

    row: int
    start: int
    stop: int
    num_past: int
    ends: bool
    line: int


class OwnRows:
    """Runs rows with caches of a class, each of which holds what `plan` says."""

    def __init__(self, plan: OwnCache) -> None:
        self._plan = plan
        self._form: Any = None
        """A cache of the class without its tensors; its first row makes it."""

    def run(self, run: RunRow, step: PagedStep, *, is_slow: bool) -> torch.Tensor:
        """Run a model on each row of a step: `hidden_TC` of all rows.

        If it `is_slow`, rows that are not new go on one token at a time.
        """
        hidden, cache, num_stored = list[torch.Tensor](), None, 0
        for piece in _pieces(step, 1 if is_slow else MAX_TOKENS):
            place = _Place(step, piece.row)
            if cache is None:
                num_stored = piece.num_past
                cache = self._load(place, num_stored) if num_stored else None
            given = {} if cache is None else {self._plan.argument: cache}
            output = run(slice(piece.start, piece.stop), {**given, "use_cache": True})
            hidden.append(output.last_hidden_state[0])
            cache = output[self._plan.argument]
            if piece.ends:
                num_tokens = piece.num_past + piece.stop - piece.start
                self._store(cache, place, num_stored, num_tokens)
                if piece.line >= 0:
                    place.states.copy([(place.slot, piece.line)])
                cache = None
        return torch.cat(hidden)

    def _load(self, place: _Place, num_tokens: int) -> Any:
        """The cache of a row of some tokens."""
        plan, (codes_line, *lines) = self._plan, place.lines
        assert self._form is not None, "the proof has run a row from its beginning"
        codes = codes_line.tolist()
        parts: dict[Path, Any] = dict(plan.plain_values(codes))
        for tensor, line, size in zip(plan.states, lines, plan.sizes(codes), strict=True):
            state = None if size is None else _state(tensor, line, size)
            parts |= dict.fromkeys(tensor.paths, state)
        for cells, (tensor, is_there) in enumerate(
            zip(plan.grown, plan.are_there(codes), strict=True)
        ):
            grown = place.read(cells, tensor, num_tokens) if is_there else None
            parts |= dict.fromkeys(tensor.paths, grown)
        return with_parts(self._form, parts)

    def _store(self, cache: Any, place: _Place, num_stored: int, num_tokens: int) -> None:
        """Store the cache of a row of some tokens, of which `num_stored` are in pages already."""
        plan, parts = self._plan, parts_of(cache)
        _check(plan.paths == parts.keys())
        if self._form is None:
            self._form = with_parts(cache, dict.fromkeys(parts))
        codes_line, *lines = place.lines
        codes_line.copy_(torch.tensor(plan.codes(parts)))
        for tensor, line in zip(plan.states, lines, strict=True):
            if (state := parts[tensor.paths[0]]) is not None:
                _check(state.dtype is line.dtype and state.numel() <= len(line))
                line[: state.numel()].copy_(state.flatten())
        for cells, tensor in enumerate(plan.grown):
            if (grown := parts[tensor.paths[0]]) is not None:
                assert tensor.axis is not None
                _check(grown.dtype is tensor.dtype)
                _check(grown.shape[tensor.axis] == num_tokens // tensor.rate)
                first = num_stored // tensor.rate
                place.write(cells, tensor, tensor.rows(grown, first), first)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where our cache has a row of a step."""

    step: PagedStep
    row: int

    @property
    def states(self) -> RowStates:
        """The states of all rows."""
        states = self.step.kv.states
        assert states is not None, "a class's own cache has a state"
        return states

    @property
    def slot(self) -> int:
        """The line of the row's state."""
        assert self.step.states is not None, "the runner finds the rows' states"
        return self.step.states.host_slots_B[self.row]

    @property
    def lines(self) -> list[torch.Tensor]:
        """The tensors of the row's state: codes, and what has one size."""
        return [part[self.slot] for part in self.states.layers[0]]

    def read(self, cells: int, tensor: CacheTensor, num_tokens: int) -> torch.Tensor:
        """A tensor in pages of a row of some tokens."""
        pages, num_entries = self.step.kv.pages[cells], num_tokens // tensor.rate
        slots_L = self._slots(tensor, 0, num_entries)
        if tensor.is_plain:
            x_L1W = read_cells(pages.k_NPKD, pages.k_scale_NPK, slots_L, tensor.dtype)
            return tensor.of_rows(_joined(x_L1W, num_entries, tensor.num_values))
        bytes_L1W = read_cells(pages.k_NPKD.view(torch.uint8), None, slots_L, torch.uint8)
        num_bytes = tensor.num_values * tensor.dtype.itemsize
        bytes_SE = _joined(bytes_L1W, num_entries, num_bytes).contiguous()
        return tensor.of_rows(bytes_SE.view(tensor.dtype))

    def write(self, cells: int, tensor: CacheTensor, rows_SE: torch.Tensor, first: int) -> None:
        """Store the entries of a tensor from `first` on."""
        pages = self.step.kv.pages[cells]
        slots_L = self._slots(tensor, first, first + len(rows_SE))
        if tensor.is_plain:
            cells_NPKD, scale_NPK = pages.k_NPKD, pages.k_scale_NPK
        else:
            cells_NPKD, scale_NPK = pages.k_NPKD.view(torch.uint8), None
            rows_SE = rows_SE.contiguous().view(torch.uint8)
        if len(slots_L):
            width = cells_NPKD.shape[3]
            missing = len(slots_L) // len(rows_SE) * width - rows_SE.shape[1]
            x_L1W = pad(rows_SE, (0, missing)).reshape(len(slots_L), 1, width)
            write_cells(x_L1W, cells_NPKD, scale_NPK, slots_L)

    def _slots(self, tensor: CacheTensor, first: int, stop: int) -> torch.Tensor:
        """The cells of entries `first .. stop - 1`, as `page * P + offset`."""
        table_M, page_size = self.step.batch.page_table_BM[self.row], self.step.kv.layout.page_size
        num_cells = tensor.cells_per_entry(page_size)
        blocks_S1 = torch.arange(first + 1, stop + 1, device=table_M.device).unsqueeze(1)
        own_C = torch.arange(num_cells, device=table_M.device)
        tokens_L = (blocks_S1 * tensor.rate - num_cells + own_C).flatten()
        return table_M[tokens_L // page_size] * page_size + tokens_L % page_size


def _joined(x_L1W: torch.Tensor, num_entries: int, num_values: int) -> torch.Tensor:
    """Cells as entries, `[S, E]`, without what fills their last cell."""
    num_cells = x_L1W.shape[0] // max(1, num_entries)
    return x_L1W.reshape(num_entries, num_cells * x_L1W.shape[2])[:, :num_values]


def _state(tensor: CacheTensor, line: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of a state, because classes change theirs in place."""
    shape = list(tensor.shape)
    if tensor.axis is not None:
        shape[tensor.axis] = size
    return line[: prod(shape)].reshape(shape).clone()


def _check(is_known: bool) -> None:
    if not is_known:
        raise WeightsError(refusal("its cache is not of the form of its first passes"))


def _pieces(step: PagedStep, most_continued: int) -> Iterator[_RowPiece]:
    """The tokens of a step between snapshots; at most `most_continued` of rows that are not new."""
    assert step.states is not None, "the runner finds the rows' states"
    lengths_B = step.batch.host_query_lengths_B.tolist()
    contexts_B, first, row = step.batch.host_context_lengths_B, 0, -1
    for segment in step.states.segments(lengths_B):
        if segment.row != row:
            row, first = segment.row, segment.start
            num_before = int(contexts_B[row]) - lengths_B[row]
        start = segment.start
        while start < segment.stop:
            num_past = num_before + start - first
            stop = min(start + (most_continued if num_past else MAX_TOKENS), segment.stop)
            is_last = stop == segment.stop
            yield _RowPiece(row, start, stop, num_past, is_last, segment.line if is_last else -1)
            start = stop

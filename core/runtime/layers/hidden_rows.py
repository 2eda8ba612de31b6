"""Rows of a model's hidden states, kept for a head that drafts from them.

Owns the shape of rows, and the way from a step's layers to the pages of its tokens. What a row is
made of is the head's matter (`core.runtime.decoders.heads.protocol`).

A row lies in the page that holds its token's keys and values, so cached prompts, tiers and the
memory table have it without a rule of their own. It follows from the tokens up to its own alone, as
keys and values do.

Shapes: T tokens, C hidden of the model, W values of a row, N pages, P tokens per page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from triptych.core.runtime.layers.attention import PagedStep

LAST = -1
"""In place of a number of layers: the hidden states after the final norm."""
INPUTS = 0
"""The states after no layer: embeddings, and features of images."""


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """A token's row."""

    size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a row."""
        return self.size * self.dtype.itemsize

    def new_pages(self, num_pages: int, page_size: int, device: torch.device) -> torch.Tensor:
        """Allocate `rows_NPW`, uninitialized."""
        return torch.empty(num_pages, page_size, self.size, dtype=self.dtype, device=device)


class TakenStates:
    """The states of one step: the residual stream after the numbers of layers in `cuts`."""

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.cuts = frozenset(layers) - {LAST}
        self._states: dict[int, torch.Tensor] = {}

    def take(self, layer: int, x_TC: torch.Tensor, pending_TC: torch.Tensor | None = None) -> None:
        """Keep a copy of the stream after `layer` layers, if it is asked for."""
        if layer in self.cuts:
            self._states[layer] = x_TC.clone() if pending_TC is None else x_TC + pending_TC

    def of(self, layer: int, hidden_TC: torch.Tensor) -> torch.Tensor:
        """The states after `layer` layers, or the normalized last ones, `hidden_TC`."""
        return hidden_TC if layer == LAST else self._states[layer]


class HiddenRows:
    """Stores the rows that `fuse` makes of a step's states.

    `layers` are numbers of layers, in the order of `fuse`: the states are the residual stream after
    so many of them, or `LAST`.
    """

    def __init__(
        self,
        layers: Sequence[int],
        fuse: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._layers, self._fuse = tuple(layers), fuse

    def begin(self) -> TakenStates:
        """The states that a step is to take."""
        return TakenStates(self._layers)

    def store(self, taken: TakenStates, hidden_TC: torch.Tensor, step: PagedStep) -> None:
        """Store a step's rows in the pages of its tokens."""
        rows_NPW = step.kv.hidden
        assert rows_NPW is not None, "the cache has a place for rows"
        rows_TW = self._fuse([taken.of(layer, hidden_TC) for layer in self._layers])
        rows_NPW.flatten(0, 1).index_copy_(0, step.batch.write_slots_T, rows_TW)

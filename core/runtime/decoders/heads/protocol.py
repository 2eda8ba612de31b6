"""The interface of heads, which draft from the hidden states of another model, their target.

Owns the protocols between head modules and those who run them. Knows no head.

A target's step computes hidden states of its layers at each position; the head makes one row of
them (`Head.fuse`), and the step stores it in the page of its position
(`core.runtime.layers.hidden_rows`). So rows are there for every token that the target has computed,
for this request or an earlier one. A head has cells of its own, in pages of its own: its cell q
belongs to the target's position q, whose row it reads, and to the token after it, q + 1. Positions
of cells are those of the target, as in the published heads; the first token of a text has no cell.

Shapes: T tokens, R rows of logits, C hidden of the head, V vocabulary of the target, W values of a
stored row, A axes of positions, F tokens that images fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from triptych.core.runtime.layers.attention import KvLayout, PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class FilledTokens:
    """The tokens of a step that images fill, by index, and the target's inputs at them."""

    index_F: torch.Tensor
    inputs_FC: torch.Tensor

    def fill(self, embedded_TC: torch.Tensor) -> torch.Tensor:
        """Put the inputs in the place of embeddings."""
        return embedded_TC.index_copy_(0, self.index_F, self.inputs_FC)


UNKNOWN_SCORE = -1e30
"""The score of tokens that a head does not know: never sampled, and finite, as all scores are."""


class Head(Protocol):
    """The part that all loaded heads have."""

    @property
    def vocab_size(self) -> int:
        """The number of logits: the target's."""
        ...

    def fuse(self, states_TC: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make `rows_TW` of the states that the blueprint's `hidden_layers` name, in that order.

        Runs within the target's steps, captured ones included. A result may be one of the states.
        """
        ...

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the target's vocabulary: `logits_RV`, float32.

        Tokens that the head does not know score `UNKNOWN_SCORE`.
        """
        ...


@runtime_checkable
class ChainHead(Head, Protocol):
    """A head that drafts one token after the other, such as EAGLE-3 and MTP.

    C equals W, since its own hidden states take the place of the target's rows where these are not
    known yet. The positions of a head that `has_axes` lie on those of the target.
    """

    row_size: int
    has_axes: bool

    def forward(
        self,
        token_ids_T: torch.Tensor,
        rows_TW: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        filled: FilledTokens | None = None,
    ) -> torch.Tensor:
        """Compute `hidden_TC`, which `logits` scores, and which is the next draft's row.

        `positions` are those of the cells, [T], or [A, T] for a head that `has_axes`; `token_ids_T`
        the tokens after them, of which `filled` replaces some embeddings. `rows_TW` may be
        overwritten.
        """
        ...


@runtime_checkable
class BlockHead(Head, Protocol):
    """A head that drafts all tokens of a block in one pass, such as DFlash.

    A block is the text's last token and masks after it; its cells begin where the target has
    computed nothing yet, and are overwritten once it has.
    """

    @property
    def mask_token_id(self) -> int:
        """The id of a token to be drafted."""
        ...

    def follow(self, rows_TW: torch.Tensor, positions_T: torch.Tensor, step: PagedStep) -> None:
        """Write the cells of the target's rows, in all layers. Nothing attends."""
        ...

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute `hidden_TC` of blocks.

        In `step.batch` each token of a block is a decode row, whose context ends with its block:
        attention that writes all cells of a step before it reads any sees the whole block.
        """
        ...


AnyHead = ChainHead | BlockHead


class HeadBlueprint(Protocol):
    """A head that is known but not yet loaded.

    `hidden_layers` are the target's states that it reads: n is the residual stream after n layers
    (0: the embeddings), `hidden_rows.LAST` the normalized last one. A blueprint of blocks drafts up
    to `block_size` - 1 tokens; 0: one in each pass. `vocab_size` counts the tokens that it embeds.
    """

    hidden_layers: tuple[int, ...]
    row_size: int
    block_size: int
    max_length: int
    vocab_size: int
    dtype: torch.dtype

    def weight_bytes(self) -> int:
        """Device bytes of the weights once loaded, without those that are the target's."""
        ...

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that one step holds in addition to weights and cache."""
        ...

    def target_bytes(self, num_tokens: int) -> int:
        """The bytes that a step of the target holds for the head: states, and rows of them."""
        ...

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of the head's own cells."""
        ...

    def build(
        self, checkpoint: Checkpoint, target: Decoder, report: Callable[[float], None]
    ) -> AnyHead:
        """Load the weights; embeddings and projections that it lacks are the target's.

        Raises `WeightsError` naming tensor and file.
        """
        ...

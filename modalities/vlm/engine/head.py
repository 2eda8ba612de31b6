"""The token head of vision models: text tokens and image positions in one step.

Owns which positions of each slot an image fills, and their coordinates. `step_features` finds the
features. A step without images runs as a text model's. Implements
`core.runtime.engine.token_runner.TokenHead`.

Shapes: T tokens of the step, F of them filled by images, P of a prompt, C hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from msgspec import structs

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.engine.text_head import TextHead, TokenSampler
from triptych.core.runtime.engine.token_runner import StepLayout
from triptych.core.runtime.kernels.paged_attention import Int64s
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.layers.decoder_layer import LateInputs
from triptych.modalities.vlm.engine.step_features import Part, StepFeatures


class VisionTextModel(CausalModel, Protocol):
    """The model behind a `VisionHead`, in addition to a text model's methods."""

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embed token ids: `x_TC`."""
        ...

    def run(
        self,
        x_TC: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        late: LateInputs | None = None,
    ) -> torch.Tensor:
        """Run the layers: `hidden_TC`. `positions` are [T], or [3, T] if they have three axes."""
        ...


_NOWHERE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderTraits:
    """How a model treats the positions that images fill.

    `placeholder_id` represents them in its vocabulary. With `has_axes` they have grid coordinates
    (M-RoPE, arXiv:2409.12191). With `whole_spans`, attention is bidirectional within an image, with
    `whole_prompts` within a prompt that has images.
    """

    placeholder_id: int
    has_axes: bool = False
    whole_spans: bool = False
    whole_prompts: bool = False


class VisionHead(TextHead):
    """Runs a `VisionTextModel` on steps with images."""

    def __init__(
        self,
        model: VisionTextModel,
        sampler: TokenSampler,
        features: StepFeatures,
        traits: PlaceholderTraits,
        *,
        max_batch_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(model, sampler, max_batch_size=max_batch_size, device=device)
        self._vision_model = model
        self._features = features
        self._traits = traits
        self._spans: dict[int, tuple[ContentSpan, ...]] = {}
        self._blocks: dict[int, Int64s] = {}  # by slot: [2, P], first and last visible position
        self._places: dict[int, Int64s] = {}  # by slot: [3, P], positions on three axes
        self._shifts_S = np.zeros(max_batch_size, dtype=np.int64)
        self._filling: list[Part] = []  # in order of positions

    def bind(self, row: TokenRow) -> None:
        """Assign the slot as for text, and record its images."""
        slot, spans = row.slot, row.contents
        self._spans.pop(slot, None)
        self._places.pop(slot, None)
        self._blocks.pop(slot, None)
        self._shifts_S[slot] = 0
        if spans:
            ids = tuple(
                self._traits.placeholder_id if token_id >= FIRST_FRAME_ID else token_id
                for token_id in row.history_ids
            )
            row = structs.replace(row, history_ids=ids)
            self._spans[slot] = spans
            if self._traits.has_axes:
                self._places[slot], self._shifts_S[slot] = _places(row.num_prompt_tokens, spans)
            if self._traits.whole_spans or self._traits.whole_prompts:
                self._blocks[slot] = self._find_blocks(row.num_prompt_tokens, spans)
        super().bind(row)

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """Ids, positions if they are not plain, and the indices of tokens that images fill."""
        is_filled_T = step.token_ids_T >= FIRST_FRAME_ID
        step.token_ids_T[is_filled_T] = self._traits.placeholder_id
        places = self._lay_out_places(step) if self._traits.has_axes else _NOWHERE
        self._filling = []
        if not is_filled_T.any():
            return (step.token_ids_T, places)
        for row, first in _first_tokens(step):
            if not is_filled_T[first : first + row.num_tokens].any():
                continue
            for span in self._spans[row.slot]:
                for low, high, feature in span.filled_ranges(row.start, row.start + row.num_tokens):
                    self._filling.append((span.digest, feature, feature + high - low))
        laid_out = (step.token_ids_T, places, is_filled_T.nonzero()[0])
        if not self._blocks:
            return laid_out
        alone_2T = np.repeat(step.host_positions_T[None], 2, axis=0)
        return (*laid_out, _with_chunks(alone_2T, step, self._blocks))

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """Run the step's layers: `hidden_TC`."""
        token_ids_T, flat_places, *filled = step.extras
        self._feed_back(token_ids_T, step)
        places, paged = step.positions_T, PagedStep(kv, step.batch, step.states)
        if self._traits.has_axes:
            has_three = len(flat_places) > len(token_ids_T)
            places = flat_places.view(3, -1) if has_three else flat_places
        if not filled and places.dim() == 1:
            return self._model.forward(token_ids_T, places, paged)
        x_TC = self._vision_model.embed(token_ids_T)
        if not filled:
            return self._vision_model.run(x_TC, places, paged)
        late = self._fill(x_TC, filled[0])
        if len(filled) > 1:
            step.batch.blocks_2T = filled[1].view(2, -1)
        return self._vision_model.run(x_TC, places, paged, late)

    def _lay_out_places(self, step: StepLayout) -> Int64s:
        """The model's positions: [T], or [3, T] if prompts have images."""
        shifted_T = step.host_positions_T + self._shifts_S[step.slots_B[step.row_T]]
        if not any(row.slot in self._places for row in step.rows[step.num_decode :]):
            return shifted_T
        return _with_chunks(np.repeat(shifted_T[None], 3, axis=0), step, self._places)

    def _find_blocks(self, num_prompt_tokens: int, spans: Sequence[ContentSpan]) -> Int64s:
        blocks_2P = np.repeat(np.arange(num_prompt_tokens)[None], 2, axis=0)
        if self._traits.whole_prompts:
            blocks_2P[:] = [[0], [num_prompt_tokens - 1]]
        for first, length in (run for span in spans for run in span.runs):
            if self._traits.whole_spans:
                blocks_2P[:, first : first + length] = [[first], [first + length - 1]]
        return blocks_2P

    def _fill(self, x_TC: torch.Tensor, index_F: torch.Tensor) -> LateInputs | None:
        """Write features to their positions; returns the late ones."""
        features = self._features.take(self._filling, x_TC)
        x_TC.index_copy_(0, index_F, features.hidden_NC)
        late_LFC = features.late_LNC
        return None if late_LFC is None else LateInputs(index_F, late_LFC)


def _with_chunks(values_AT: Int64s, step: StepLayout, by_slot: Mapping[int, Int64s]) -> Int64s:
    """Replace the prompts' columns of `values_AT` by their rows' values, `[A, P]` each."""
    for row, first in _first_tokens(step):
        if row.slot in by_slot:
            chunk_AN = by_slot[row.slot][:, row.start : row.start + row.num_tokens]
            values_AT[:, first : first + chunk_AN.shape[1]] = chunk_AN
    return values_AT


def _first_tokens(step: StepLayout) -> list[tuple[TokenRow, int]]:
    """Each prompt row and its first token in the step."""
    firsts, first = [], step.num_decode
    for row in step.rows[step.num_decode :]:
        firsts.append((row, first))
        first += row.num_tokens
    return firsts


def _places(num_prompt_tokens: int, spans: Sequence[ContentSpan]) -> tuple[Int64s, int]:
    """Positions `[3, P]` of a prompt with images, and the offset of later positions.

    Text advances by one along all axes, an image by its rows and columns along two. Text after an
    image begins after the longer of the two.
    """
    positions_3P = np.empty((3, num_prompt_tokens), dtype=np.int64)
    done, place = 0, 0
    for span in spans:
        (first, length), (height, width) = span.runs[0], span.grid
        assert len(span.runs) == 1, "an image on a grid is one run"
        assert height * width == length, "a grid has one place per feature"
        positions_3P[:, done:first] = np.arange(place, place + first - done)
        place += first - done
        rows_N, columns_N = np.divmod(np.arange(length), width)
        positions_3P[:, first : first + length] = place
        positions_3P[1, first : first + length] += rows_N
        positions_3P[2, first : first + length] += columns_N
        place += max(height, width)
        done = first + length
    positions_3P[:, done:] = np.arange(place, place + num_prompt_tokens - done)
    return positions_3P, place - done

"""The token head of vision models: text tokens and image positions in one step.

Owns which positions of each slot an image fills, and their coordinates. `step_features` finds the
features. A step without images runs as a text model's. Implements
`core.runtime.engine.token_runner.TokenHead`.

Shapes: T tokens of the step, F of them filled by images, P of a prompt, A axes, C hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs
from typing_extensions import override

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.runtime.engine.text_head import TextHead, TokenSampler
from triptych.core.runtime.engine.token_runner import StepLayout
from triptych.core.runtime.kernels.paged_attention import Int64s
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.modalities.vlm.engine.places import Places
from triptych.modalities.vlm.engine.step_features import Part, StepFeatures
from triptych.modalities.vlm.engine.vision_model import StepImages, VisionTextModel

_NOWHERE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceholderTraits:
    """How a model treats the positions that images fill.

    `input_id` represents them in its input, `placeholder_id` in its vocabulary. With `places`,
    positions lie on several axes. With `whole_spans`, attention is bidirectional within an image,
    with `whole_prompts` within a prompt that has images. Windows hold for it, too, unless an image
    `exceeds_windows`.
    """

    placeholder_id: int
    input_id: int
    places: Places | None = None
    whole_spans: bool = False
    whole_prompts: bool = False
    exceeds_windows: bool = False


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
        self._places: dict[int, Int64s] = {}  # by slot: [A, P], positions on several axes
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
            row = structs.replace(row, history_ids=self._bind_images(row))
        super().bind(row)

    def _bind_images(self, row: TokenRow) -> tuple[int, ...]:
        """Record the images of a row. Returns its ids in the model's vocabulary."""
        slot, spans, traits = row.slot, row.contents, self._traits
        ids = np.array(row.history_ids)
        is_filled = ids >= FIRST_FRAME_ID
        self._spans[slot] = spans
        if traits.places is not None:
            input_ids = np.where(is_filled, traits.input_id, ids)[: row.num_prompt_tokens]
            self._places[slot], self._shifts_S[slot] = traits.places(input_ids, spans)
        if traits.whole_spans or traits.whole_prompts:
            self._blocks[slot] = self._find_blocks(row.num_prompt_tokens, spans)
        return tuple(np.where(is_filled, traits.placeholder_id, ids).tolist())

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """Ids, positions if they are not plain, and the indices of tokens that images fill."""
        return (*self._lay_out_images(step), *self._lay_out_adapters(step))

    def _lay_out_images(self, step: StepLayout) -> Sequence[Int64s]:
        is_filled_T = step.token_ids_T >= FIRST_FRAME_ID
        step.token_ids_T[is_filled_T] = self._traits.input_id
        has_axes = self._traits.places is not None
        places = self.places(step) if has_axes else _NOWHERE
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
        token_ids_T, flat_places, *filled = self._select_adapters(step.extras)
        self._feed_back(token_ids_T, step)
        places, paged = step.positions_T, PagedStep(kv, step.batch, step.states)
        if self._traits.places is not None:
            has_axes = len(flat_places) > len(token_ids_T)
            places = flat_places.view(-1, len(token_ids_T)) if has_axes else flat_places
        if not filled and places.dim() == 1:
            return self._model.forward(token_ids_T, places, paged)
        images = None
        if filled:
            images = StepImages(filled[0], self._features.take(self._filling))
        if len(filled) > 1:
            for batch in (step.batch, step.batch.windowed):
                if batch is not None:
                    batch.blocks_2T = filled[1].view(2, -1)
        return self._vision_model.see(token_ids_T, places, paged, images)

    @override
    def places(self, step: StepLayout) -> Int64s:
        """The model's positions: [T], or [A, T] if prompts have images.

        The step may be that of a head with cells at the same positions of the same slots.
        """
        if self._traits.places is None:
            return step.host_positions_T
        shifted_T = step.host_positions_T + self._shifts_S[step.slots_B[step.row_T]]
        prompts = (self._places.get(row.slot) for row in step.rows[step.num_decode :])
        places_AP = next((places for places in prompts if places is not None), None)
        if places_AP is None:
            return shifted_T
        repeated_AT = np.repeat(shifted_T[None], len(places_AP), axis=0)
        return _with_chunks(repeated_AT, step, self._places)

    def _find_blocks(self, num_prompt_tokens: int, spans: Sequence[ContentSpan]) -> Int64s:
        """The blocks of `find_blocks`, or one of the whole prompt."""
        runs = [run for span in spans for run in span.runs]
        if self._traits.whole_prompts:
            runs = [(0, num_prompt_tokens)]
        exceeds_windows = self._traits.exceeds_windows
        return find_blocks(num_prompt_tokens, runs, exceeds_windows=exceeds_windows)


def find_blocks(
    num_tokens: int, runs: Sequence[tuple[int, int]], *, exceeds_windows: bool
) -> Int64s:
    """Blocks `[2, num_tokens]` of runs (first position, length) that see each other.

    Where windows hold, a block begins with its own token: earlier ones are seen in any case.
    """
    blocks_2P = np.repeat(np.arange(num_tokens)[None], 2, axis=0)
    for first, length in runs:
        blocks_2P[1, first : first + length] = first + length - 1
        if exceeds_windows:
            blocks_2P[0, first : first + length] = first
    return blocks_2P


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

"""The positions of a prompt with images, where they lie on several axes.

Owns both sources: the grid of Qwen's models (M-RoPE, arXiv:2409.12191), computed here, and the
function that another class of transformers has for it.

Shapes: P positions of a prompt, A axes, N features of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.runtime.kernels.paged_attention import Int64s

Places = Callable[[Int64s, Sequence[ContentSpan]], tuple[Int64s, int]]
"""From a prompt's ids and images to its positions `[A, P]`, and the offset of later positions."""


def grid_places(ids_P: Int64s, spans: Sequence[ContentSpan]) -> tuple[Int64s, int]:
    """Positions `[3, P]` of a prompt with images, and the offset of later positions.

    Text advances by one along all axes, an image by its rows and columns along two. Text after an
    image begins after the longer of the two.
    """
    positions_3P = np.empty((3, len(ids_P)), dtype=np.int64)
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
    positions_3P[:, done:] = np.arange(place, place + len(ids_P) - done)
    return positions_3P, place - done


@dataclass(frozen=True, slots=True)
class ClassPlaces:
    """Implements `Places` with the function of a transformers model, on the CPU."""

    model: Any
    merge_size: int

    def __call__(self, ids_P: Int64s, spans: Sequence[ContentSpan]) -> tuple[Int64s, int]:
        """Ask the model. Images are runs of its image token."""
        is_image_1P = torch.zeros((1, len(ids_P)), dtype=torch.int64)
        for first, length in (run for span in spans for run in span.runs):
            is_image_1P[:, first : first + length] = 1
        grids = [(1, *(self.merge_size * side for side in span.grid)) for span in spans]
        positions_A1P, delta_11 = self.model.get_rope_index(
            input_ids=torch.from_numpy(ids_P)[None],
            mm_token_type_ids=is_image_1P,
            image_grid_thw=torch.tensor(grids),
        )
        return positions_A1P[:, 0].numpy(), int(delta_11)

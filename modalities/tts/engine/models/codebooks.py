"""Frames of codes as a decoder's input: the sum of every codebook's embedding of its code.

Owns the sum, and how frames and words share the positions of a step. Knows no family.

Shapes: N frames, Q codes, E entries of all codebooks, V entries of one or of the text, T, X, F as
in `modalities.tts.engine.frame_head`, C hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding_bag

from triptych.modalities.tts.engine.frame_head import FrameInputs


class Codebooks:
    """Tables of codebooks of these `sizes`, concatenated in `weight_EC`; left uninitialized."""

    def __init__(
        self, sizes: Sequence[int], hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (sum(sizes), hidden_size)
        self.weight_EC = torch.empty(shape, dtype=dtype, device=device)
        self.tables = self.weight_EC.split(list(sizes))
        ends_Q = torch.tensor(sizes, device=device).cumsum(0)
        self._offsets_Q = ends_Q - torch.tensor(sizes, device=device)

    def __call__(self, codes_NQ: torch.Tensor) -> torch.Tensor:
        """`x_NC`: the sum over each frame's codes."""
        x_NC: torch.Tensor = embedding_bag(codes_NQ + self._offsets_Q, self.weight_EC, mode="sum")
        return x_NC

    def one(self, codes_N: torch.Tensor, codebook: int) -> torch.Tensor:
        """`x_NC` of one codebook's codes."""
        return self.weight_EC.index_select(0, codes_N + self._offsets_Q[codebook])


def embed_inputs(inputs: FrameInputs, text_VC: torch.Tensor, codebooks: Codebooks) -> torch.Tensor:
    """`x_TC` of a step's positions, from words and frames."""
    frames_FC = codebooks(inputs.codes_FQ)
    if not len(inputs.text_ids_X):
        return frames_FC  # only decode rows in this step
    x_TC = frames_FC.new_empty(len(inputs.positions_T), frames_FC.shape[1])
    x_TC.index_copy_(0, inputs.frame_index_F, frames_FC)
    return x_TC.index_copy_(0, inputs.text_index_X, text_VC.index_select(0, inputs.text_ids_X))

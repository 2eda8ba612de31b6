"""The memory of the keys that an index chooses in a step, for the native kernels.

Owns what the structure `Choice` of native/kernels.h points to. Calls nothing.

Shapes: T tokens, H heads of the index, C chosen keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.key_index import MAX_SCORES
from triptych.core.runtime.kernels.native.arguments import ChoiceArguments

if TYPE_CHECKING:
    from triptych.core.runtime.kernels.paged_attention import AttentionBatch


class NativeChoice:
    """The choice of a step's tokens, which each layer with an index makes for itself.

    `weights_TH` are those of the index's heads, or memory for them: float32, contiguous.
    """

    __slots__ = ("_ranks", "_starts_T", "arguments", "lengths_T", "slots_TC", "weights_TH")

    def __init__(self, batch: AttentionBatch, num_chosen: int, weights_TH: torch.Tensor) -> None:
        num_tokens, self.weights_TH = len(weights_TH), weights_TH
        longest = int(batch.host_context_lengths_B.max())
        num_ranked = min(num_tokens, max(1, MAX_SCORES // longest))
        new_T = torch.empty(num_tokens, dtype=torch.int64)
        self.slots_TC = new_T.new_empty(num_tokens, num_chosen)
        self.lengths_T, self._starts_T = new_T, torch.arange(num_tokens)
        self._ranks = torch.empty(num_ranked * longest, dtype=torch.int32)
        self.arguments = ChoiceArguments(
            weights=self.weights_TH.data_ptr(),
            ranks=self._ranks.data_ptr(),
            slots=self.slots_TC.data_ptr(),
            lengths=self.lengths_T.data_ptr(),
            starts=self._starts_T.data_ptr(),
            num_chosen=num_chosen,
            num_ranked=num_ranked,
            rank_stride=longest,
        )

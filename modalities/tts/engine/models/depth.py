"""The depth decoder of models with one position per frame: a small decoder over a frame's codes.

Owns the inner loop over codes, which runs for all rows at once and is one unit of work of a step,
and its cache: it attends only to its own frame, so that is one page per slot, rewritten each time.
Knows no family.

Shapes: R rows, Q codes, C backbone hidden, D depth hidden, V codebook.
"""

from __future__ import annotations

import numpy as np
import torch

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import KvCache, KvLayout, PagedStep
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.sampling.sampler import FrameSampler
from triptych.modalities.tts.engine.models.codebooks import Codebooks


class DepthDecoder:
    """Generates a frame's codes one after another, from the backbone's hidden state.

    Fill `stack`, `projector` (none where both decoders are equally wide) and `heads_QVD`, then call
    `prepare` once. Codes from `num_sampled` on are never sampled.
    """

    def __init__(
        self,
        config: DecoderConfig,
        codebooks: Codebooks,
        projector: Linear | None,
        *,
        num_sampled: int,
        max_batch_size: int,
    ) -> None:
        table_EC = codebooks.weight_EC
        dtype, device = table_EC.dtype, table_EC.device
        self._num_sampled = num_sampled
        self._num_codes = config.rope.max_length
        self._codebooks = codebooks
        self.stack = DecoderStack(config, dtype=dtype, device=device)
        self.projector = projector
        shape = (self._num_codes - 1, config.vocab_size, config.hidden_size)
        self.heads_QVD = torch.empty(shape, dtype=dtype, device=device)
        self._heads: list[Linear] = []
        self._layout = depth_layout(config, dtype)
        self._max_batch_size = max_batch_size
        self._positions_Q = torch.arange(self._num_codes, device=device)

    def prepare(self, native: NativeKernels | None) -> None:
        """Bring the loaded weights into the layout the step uses, and allocate the cache."""
        self.stack.prepare(native)
        if self.projector is not None:
            self.projector.prepare(native)
        self._heads = [Linear.of(weight_VD) for weight_VD in self.heads_QVD]
        del self.heads_QVD
        for head in self._heads:
            head.prepare(native)
        device = self._positions_Q.device
        self._kv = KvCache(self._layout, self._max_batch_size, device, native)

    def sample(
        self, hidden_RC: torch.Tensor, first_R: torch.Tensor, sampler: FrameSampler
    ) -> torch.Tensor:
        """`codes_RQ`, given the first."""
        self._step(0, hidden_RC, sampler.slots_B)
        codes = [first_R]
        for code, head in enumerate(self._heads, start=1):
            x_RC = self._codebooks.one(codes[-1], code - 1)
            hidden_RD = self._step(code, x_RC, sampler.slots_B)
            codes.append(sampler.sample(head(hidden_RD)[:, : self._num_sampled], code))
        return torch.stack(codes, 1)

    def _step(self, position: int, x_RC: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
        """One position of every row: `hidden_RD`. Slot s uses page s."""
        num_rows, page_size = len(slots_R), self._layout.page_size
        batch = AttentionBatch(
            page_table_BM=slots_R[:, None],
            context_lengths_B=torch.full_like(slots_R, position + 1),
            query_starts_B=torch.arange(num_rows, device=slots_R.device),
            write_slots_T=slots_R * page_size + position,
            num_decode_rows=num_rows,
            host_query_lengths_B=np.ones(num_rows, np.int64),
            host_context_lengths_B=np.full(num_rows, position + 1),
            native=self._kv.native,
        )
        positions_R = self._positions_Q[position].expand(num_rows)
        x_RD = x_RC if self.projector is None else self.projector(x_RC)
        return self.stack.run(x_RD, positions_R, PagedStep(self._kv, batch))


def depth_layout(config: DecoderConfig, dtype: torch.dtype) -> KvLayout:
    """A cache whose pages hold a whole frame each."""
    return config.kv_layout(1 << (config.rope.max_length - 1).bit_length(), dtype)

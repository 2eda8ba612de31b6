"""The rig for models whose steps yield frames of codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from support.decoder_rig import Rig
from triptych.core.engine_api.frames import StepCodes, frame_id
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.sampling.sampler import FrameSampler
from triptych.modalities.tts.engine.frame_head import FrameHead, FrameInputs, FrameSamples


class FrameRecorder:
    """A frame model that remembers the logits it would sample the first code from: `vocab_size`."""

    def __init__(
        self, model: Any, *, logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.num_codes = model.num_codes
        self.sample_state = model.sample_state
        self._logits = logits
        self.last_logits_RV = torch.empty(0)

    def bind(self, slot: int, prompt_ids: Sequence[int], sampled: Sequence[StepCodes]) -> None:
        self.model.bind(slot, prompt_ids, sampled)

    def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
        return self.model.forward(inputs, kv)

    def sample(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> FrameSamples:
        self.last_logits_RV = self._logits(hidden_RC)
        return self.model.sample(hidden_RC, positions_R, sampler)


class FrameRig(Rig):
    """Its recorder is a `FrameRecorder`."""

    head_type = FrameHead


def frame_ids(frames: Sequence[Sequence[int]]) -> list[int]:
    return [frame_id(codes) for codes in frames]

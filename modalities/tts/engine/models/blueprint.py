"""What the loader asks of a speech-token model before and while it is built.

Owns the protocol, so that all families are alike to loader and runner. Knows no family.

Shapes: N steps, K codes of a step, Q codebooks, F codec frames, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.core.config import SpeechOptions
from triptych.core.engine.text_head import CausalModel
from triptych.core.frames import END_FRAME_ID
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import KvLayout
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.codecs.protocol import CodecDecoder
from triptych.modalities.tts.engine.frame_head import FrameModel
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip

Codes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTraits:
    """How a family's steps become speech. Plain data.

    A codec frame takes `steps_per_frame` steps, the first of them `delay_steps` more. Where
    positions of a prompt read what comes after them, it has no `causal_prompts`, and prompts that
    begin alike cannot share pages. Each segment's prompt has the last `num_context_steps` of the
    one before, and `context_end_ids` behind them.
    """

    steps_per_frame: int = 1
    delay_steps: int = 0
    stop_ids: tuple[int, ...] = (END_FRAME_ID,)
    voices: Mapping[str, VoicePrompt] = field(default_factory=dict)
    num_context_steps: int = 0
    context_end_ids: tuple[int, ...] = ()
    causal_prompts: bool = True

    def num_frames(self, num_steps: int) -> int:
        """Whole codec frames in so many steps."""
        return max(0, num_steps - self.delay_steps) // self.steps_per_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCodec:
    """A loaded codec. `encode` maps samples [S] at the decoder's rate to codes [Q, F].

    Codes from `codebook_size` on (`None`: there are no others) end the row that drew them.
    """

    decoder: CodecDecoder
    codebook_size: int | None = None
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSetup:
    """Where a model shall run, and with what: all that blueprints need beside `config.json`."""

    folder: Path
    options: SpeechOptions
    max_length: int
    max_batch_size: int
    dtype: torch.dtype
    device: torch.device
    native: NativeKernels | None = None


class SpeechBlueprint(Protocol):
    """A speech-token model that is known but not yet loaded."""

    @property
    def max_length(self) -> int:
        """Positions of a segment, its prompt included."""
        ...

    @property
    def num_logits(self) -> int:
        """Ids that one draw chooses from."""
        ...

    @property
    def traits(self) -> SpeechTraits:
        """How its steps become speech."""
        ...

    def weight_bytes(self) -> int:
        """Device bytes of the weights once loaded, the codec's left out."""
        ...

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most that one token step holds beside weights and cache."""
        ...

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of its cache."""
        ...

    def build(
        self, checkpoint: Checkpoint, report: Callable[[float], None]
    ) -> CausalModel | FrameModel:
        """Load the weights. Raises `WeightsError` naming tensor and file."""
        ...

    def codec_bytes(self) -> int:
        """Device bytes of the codec's weights."""
        ...

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the codec. Raises `WeightsError`, and `ConfigError` for options it cannot have."""
        ...

    def frames(self, steps_NK: Codes) -> Codes:
        """`codes_QF` of the whole frames in some steps, the first of them a frame's first."""
        ...

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """What the voice of a clip is to this model; asked only where there is an encoder."""
        ...

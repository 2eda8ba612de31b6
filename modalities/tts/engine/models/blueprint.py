"""The loader's interface to a speech-token model, before and while it is built.

Owns the protocol, so that loader and runner treat all families alike, and the common code of
families whose steps are frames. Knows no family.

Shapes: N steps, K codes of a step, Q codebooks, F codec frames, S samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.core.engine_api.frames import END_FRAME_ID, frame_id
from triptych.core.options.config import SpeechOptions
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.native import position_values
from triptych.core.runtime.decoders.projection_targets import AS_STORED
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.sampling.sampler import LOGIT_BYTES
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, load_tensors
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.codecs.protocol import SpeechCodec
from triptych.modalities.tts.engine.frame_head import FrameModel
from triptych.modalities.tts.plan import FramePattern, VoicePrompt
from triptych.modalities.tts.wire import VoiceClip

Codes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTraits(FramePattern):
    """How a family's steps become speech. Plain data.

    Without `causal_prompts`, positions of a prompt depend on later ones, so prompts with equal
    beginnings cannot share pages. Each segment's prompt includes the last `num_context_steps` of
    the previous segment, and `context_end_ids` after them. At most `ids_per_step` ids of a prompt
    end in a step of a model that knows which it speaks.
    """

    stop_ids: tuple[int, ...] = (END_FRAME_ID,)
    voices: Mapping[str, VoicePrompt] = field(default_factory=dict)
    num_context_steps: int = 0
    context_end_ids: tuple[int, ...] = ()
    causal_prompts: bool = True
    ids_per_step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSetup:
    """A blueprint's inputs in addition to `config.json`: folder, options, limits, device, types."""

    folder: Path
    options: SpeechOptions
    max_length: int
    max_batch_size: int  # slots; one more than rows if steps are captured
    dtype: torch.dtype
    device: torch.device
    native: NativeKernels | None = None
    encoding: WeightEncoding = AS_STORED


class SpeechBlueprint(Protocol):
    """A speech-token model that is known but not yet loaded."""

    max_length: int
    """Maximum positions of a segment, including its prompt."""
    num_logits: int
    """The number of logits of one sample."""
    traits: SpeechTraits

    def weight_bytes(self) -> int:
        """Device bytes of the weights once loaded, without the codec's."""
        ...

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Peak memory of one token step in addition to weights and cache."""
        ...

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The layout of the model's KV cache."""
        ...

    def build(
        self, checkpoint: Checkpoint, report: Callable[[float], None]
    ) -> CausalModel | FrameModel:
        """Load the weights. Raises `WeightsError` that names tensor and file."""
        ...

    def codec_bytes(self) -> int:
        """Device bytes of the codec's weights."""
        ...

    def codec_state_bytes(self, num_rows: int) -> int:
        """Device bytes of the state of `num_rows` streams in the codec's decoder."""
        ...

    def encode_bytes(self) -> int:
        """Peak memory of encoding the longest recording; 0 for a model that imitates none."""
        ...

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the codec. Raises `WeightsError`, and `ConfigError` for unsupported options."""
        ...

    def frames(self, steps_NK: Codes) -> Codes:
        """`codes_QF` of the complete frames in `steps_NK`, whose first step begins a frame."""
        ...

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """The clip's voice as a prompt; called only if the codec has an encoder."""
        ...


class LoadableModel(FrameModel, Protocol):
    """A frame model whose parameters are allocated uninitialized, then loaded and prepared."""

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        ...


Model = TypeVar("Model", bound=LoadableModel)


class FrameBlueprint(SpeechBlueprint, ABC, Generic[Model]):
    """The common code of families whose steps are frames, sampled on top of our decoder."""

    traits = SpeechTraits()

    def __init__(
        self, setup: SpeechSetup, decoder: DecoderConfig, *, num_codebooks: int, num_logits: int
    ) -> None:
        self.max_length = decoder.rope.max_length
        self.num_logits = num_logits
        self._num_codebooks = num_codebooks
        self._setup, self._decoder = setup, decoder

    @abstractmethod
    def construct(self, device: torch.device) -> Model:
        """Construct the model with uninitialized parameters."""

    @abstractmethod
    def targets(self, model: Model, names: Collection[str] = ()) -> Iterable[Target]:
        """The destination of each tensor of a checkpoint that has these `names`."""

    @abstractmethod
    def is_unused(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is not part of this model."""

    def weight_bytes(self) -> int:
        """Bytes of the parameters."""
        targets = self.targets(self.construct(torch.device("meta")))
        return sum(target.num_bytes(self._setup.dtype.itemsize) for target in targets)

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Peak memory of a step in addition to weights and cache."""
        num_values = num_tokens * position_values(self._decoder)
        num_logits = num_rows * self._num_codebooks * self.num_logits
        return num_values * self._setup.dtype.itemsize + LOGIT_BYTES * num_logits

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache of the decoder."""
        return self._decoder.kv_layout(page_size, dtype)

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> Model:
        """Allocate, stream the weights into place and pack them."""
        model = self.construct(self._setup.device)
        targets = self.targets(model, checkpoint.tensors)
        load_tensors(checkpoint, targets, ignored=self.is_unused, report=report)
        with torch.inference_mode():
            model.prepare(self._setup.native)
        return model

    def encode_bytes(self) -> int:
        """None: only some families imitate recordings."""
        return 0

    def frames(self, steps_NK: Codes) -> Codes:
        """Each step is a frame."""
        return np.ascontiguousarray(steps_NK.T)


class CloningBlueprint(FrameBlueprint[Model]):
    """A family with a published codec that imitates recordings: their frames go into prompts."""

    codec: HubCodec
    clip_end_ids: tuple[int, ...]
    """Ids of words that follow a clip's sound in a prompt."""

    def codec_bytes(self) -> int:
        """Bytes of the codec's weights."""
        return self.codec.num_bytes()

    def codec_state_bytes(self, num_rows: int) -> int:
        """Bytes of the state of `num_rows` streams in the codec."""
        return self.codec.state_bytes(num_rows)

    def encode_bytes(self) -> int:
        """Peak memory of the codec's encoder."""
        return self.codec.encode_bytes()

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the codec with its encoder."""
        return self.codec.open(
            self._setup.device,
            report,
            num_rows=num_rows,
            num_codebooks=self._num_codebooks,
            is_cloning=True,
        )

    def steps(self, codes_QF: Codes) -> Codes:
        """The steps that generate these frames: `steps_NK`."""
        return codes_QF.T

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """The clip's words, its steps, and the words that end its sound."""
        codes = tuple(map(tuple, self.steps(codes_QF).tolist()))
        ids = (*clip.prompt_ids, *map(frame_id, codes), *self.clip_end_ids)
        return VoicePrompt(prompt_ids=ids, codes=codes)

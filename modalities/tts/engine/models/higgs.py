"""Higgs Audio V2: shared attention, and separate MLPs and norms for words and for sound.

Owns the fields of `config.json` that are not every Llama's, the choice of MLP by position, the
delay pattern, and the model's memory. A step of one kind runs through that kind's stack, in one
native call if available; only if words and sound share a step are their positions separated at each
layer. The tokenizer is published separately: it is expected in the model's folder as
`audio_tokenizer`. Knows no scheduler.

Step k of a segment holds, for codebook c, the code of frame k - c - 1: steps 0 to c hold a begin
mark. After the first end mark, codebook 0 continues with end marks, one step later also codebook 1,
and so on; a step of end marks alone is the end.

Shapes: R rows, T positions, X words, F frames, Q codebooks, V entries of one, C hidden, W words of
the vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from triptych.core.engine_api.frames import StepCodes
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.decoders.projection_targets import norm_targets
from triptych.core.runtime.decoders.tensor_names import mlp_targets, stack_targets
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, DecoderLayer, Mlp
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.sampling.sampler import FrameSampler
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.tts.configs.higgs import CODEC_FOLDER
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.frame_head import FrameInputs, FrameSamples
from triptych.modalities.tts.engine.models.blueprint import (
    CloningBlueprint,
    Codes,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.codebooks import Codebooks, embed_inputs

Id = Annotated[int, msgspec.Meta(ge=0)]


class HiggsFields(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of a checkpoint's config.json. `codebook_size` counts the two marks of a stream.

    In a prompt, sound is enclosed by two words, and `eos_token_id` ends a turn.
    """

    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 500_000.0
    num_codebooks: Count = 8
    codebook_size: Count = 1026
    eos_token_id: Id = 128_009
    audio_bos_token_id: Id = 128_013
    audio_eos_token_id: Id = 128_012
    audio_stream_bos_id: Id = 1024
    audio_stream_eos_id: Id = 1025


class HiggsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The decoder's configuration, and the fields of Higgs."""

    fields: HiggsFields
    decoder: DecoderConfig

    @classmethod
    def read(cls, config: Mapping[str, Any], *, max_length: int = 0) -> HiggsConfig:
        """Translate `config.json`. Raises `WeightsError` that names the field."""
        fields = parse(config, HiggsFields)
        attention = (attention_of(fields),) * fields.num_hidden_layers
        return cls(fields=fields, decoder=decoder_of(fields, attention, max_length))


class HiggsModel:
    """A `frame_head.FrameModel`. Fill `targets`, then call `prepare` once."""

    def __init__(
        self, config: HiggsConfig, *, max_batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        fields = config.fields
        self.num_codes, self._size = fields.num_codebooks, fields.codebook_size
        self._begin_id, self._end_id = fields.audio_stream_bos_id, fields.audio_stream_eos_id
        width = fields.hidden_size
        self.text_WC = torch.empty(config.decoder.vocab_size, width, dtype=dtype, device=device)
        self.codebooks = Codebooks([self._size] * self.num_codes, width, dtype=dtype, device=device)
        self.words = DecoderStack(config.decoder, dtype=dtype, device=device)
        self.sound = DecoderStack(config.decoder, dtype=dtype, device=device)
        self.sound.norm = self.words.norm
        for theirs, ours in zip(self.words.layers, self.sound.layers, strict=True):
            ours.attention = theirs.attention
        num_logits = self.num_codes * self._size
        self.head = Linear(width, num_logits, has_bias=False, dtype=dtype, device=device)
        self._first_S = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._num_ended_S = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.sample_state: Sequence[torch.Tensor] = (self._num_ended_S,)
        self._order_Q = torch.arange(self.num_codes, device=device)

    def targets(self, encoding: WeightEncoding) -> Iterator[Target]:
        """Every tensor and its destination; the layers' are held as `encoding` says."""
        yield TensorTarget("model.embed_tokens.weight", self.text_WC)
        name = "model.embed_audio_tokens.embed_audio_tokens.weight"
        yield TensorTarget(name, self.codebooks.weight_EC)
        yield TensorTarget("audio_lm_head.weight", self.head.weight_OI)
        yield from stack_targets(self.words, "model", encoding)
        for index, layer in enumerate(self.sound.layers):
            prefix = f"model.layers.{index}.audio"
            yield from norm_targets(f"{prefix}_input_layernorm", layer.input_norm)
            yield from norm_targets(f"{prefix}_post_attention_layernorm", layer.mlp_norm)
            assert isinstance(layer.mlp, Mlp)
            yield from mlp_targets(f"{prefix}_mlp", layer.mlp, encoding)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.words.prepare(native)
        self.sound.prepare(native)
        self.head.prepare(native)

    def bind(self, slot: int, prompt_ids: Sequence[int], sampled: Sequence[StepCodes]) -> None:
        """Record where the row's segment begins, and how many end marks it has sampled."""
        has_end = [self._end_id in codes for codes in sampled]
        num_ended = len(sampled) - has_end.index(True) if any(has_end) else 0
        self._first_S[slot].fill_(len(prompt_ids))
        self._num_ended_S[slot].fill_(num_ended)

    def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
        """Run the layers: `hidden_TC`."""
        x_TC = embed_inputs(inputs, self.text_WC, self.codebooks)
        positions_T = inputs.positions_T
        if not len(inputs.text_ids_X):
            return self.sound.run(x_TC, positions_T, PagedStep(kv, inputs.batch))
        if not len(inputs.codes_FQ):
            return self.words.run(x_TC, positions_T, PagedStep(kv, inputs.batch))
        places = self.words.place(positions_T)
        for words, sound in zip(self.words.layers, self.sound.layers, strict=True):
            normed_TC = torch.empty_like(x_TC)
            for layer, index in _layers_by_kind(words, sound, inputs):
                normed_TC.index_copy_(0, index, layer.input_norm(x_TC.index_select(0, index)))
            assert words.attention is not None
            x_TC = words.attention(normed_TC, x_TC, places, PagedStep(kv, inputs.batch))
            for layer, index in _layers_by_kind(words, sound, inputs):
                assert layer.mlp is not None
                part = x_TC.index_select(0, index)
                x_TC.index_copy_(0, index, layer.mlp(layer.mlp_norm(part), part))
        return self.words.norm(x_TC)

    def sample(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> FrameSamples:
        """Sample all codes at once, and place the marks of the delay pattern."""
        logits_RQV = self.head(hidden_RC).view(-1, self.num_codes, self._size)
        slots_R = sampler.slots_B
        step_R1 = (positions_R - self._first_S[slots_R])[:, None]
        num_ended_R = self._num_ended_S[slots_R]
        codes_RQ = sampler.sample_all(logits_RQV)
        codes_RQ = torch.where(self._order_Q >= step_R1, self._begin_id, codes_RQ)
        codes_RQ = torch.where(self._order_Q < num_ended_R[:, None], self._end_id, codes_RQ)
        is_mark_RQ = codes_RQ == self._end_id
        is_ending_R = is_mark_RQ.any(-1) | (num_ended_R > 0)
        self._num_ended_S.index_copy_(0, slots_R, num_ended_R + is_ending_R)
        return FrameSamples(codes_RQ, is_mark_RQ.all(-1))


def _layers_by_kind(
    words: DecoderLayer, sound: DecoderLayer, inputs: FrameInputs
) -> tuple[tuple[DecoderLayer, torch.Tensor], tuple[DecoderLayer, torch.Tensor]]:
    return (words, inputs.text_index_X), (sound, inputs.frame_index_F)


_UNUSED = frozenset({"text_lm_head.weight", "model.embed_audio_tokens.audio_tokens_offsets"})


class HiggsBlueprint(CloningBlueprint[HiggsModel]):
    """A checkpoint of `HiggsAudioV2ForConditionalGeneration`."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        self.config = HiggsConfig.read(config, max_length=setup.max_length)
        fields = self.config.fields
        super().__init__(
            setup,
            self.config.decoder,
            num_codebooks=fields.num_codebooks,
            num_logits=fields.codebook_size,
        )
        self.clip_end_ids = (fields.audio_eos_token_id, fields.eos_token_id)
        self.traits = SpeechTraits(delay_steps=fields.num_codebooks)
        self.codec = HubCodec(setup.folder / CODEC_FOLDER, setup.options, native=setup.native)

    def construct(self, device: torch.device) -> HiggsModel:
        """Construct the model with uninitialized parameters."""
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return HiggsModel(self.config, max_batch_size=num_slots, dtype=dtype, device=device)

    def targets(self, model: HiggsModel, names: Collection[str] = ()) -> Iterable[Target]:
        """Every tensor has one name."""
        return model.targets(self._setup.encoding)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is the text head, or offsets that the configuration implies."""
        return name in _UNUSED

    def frames(self, steps_NK: Codes) -> Codes:
        """Frame f has its c-th code in step f + c + 1.

        The last frame holds an end mark, which counts as the last code, as in transformers.
        """
        num_codes = steps_NK.shape[1]
        num_frames = len(steps_NK) - num_codes
        order_Q1 = np.arange(num_codes)[:, None]
        codes_QF = steps_NK[order_Q1 + 1 + np.arange(num_frames), order_Q1]
        return np.clip(codes_QF, 0, self.config.fields.audio_stream_bos_id - 1)

    def steps(self, codes_QF: Codes) -> Codes:
        """The steps that generate these frames, between the marks of a stream: `steps_NK`."""
        fields = self.config.fields
        num_codes, num_frames = codes_QF.shape
        steps_NK = np.full((num_frames + num_codes + 1, num_codes), fields.audio_stream_eos_id)
        order_1Q = np.arange(num_codes)[None]
        time_N1 = np.arange(len(steps_NK))[:, None] - order_1Q
        steps_NK[time_N1 < 1] = fields.audio_stream_bos_id
        order_Q1 = order_1Q.T
        steps_NK[order_Q1 + 1 + np.arange(num_frames), order_Q1] = codes_QF
        return steps_NK

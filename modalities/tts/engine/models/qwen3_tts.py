"""Qwen3-TTS: a decoder over frames that also hold text, a depth decoder, and a 12 Hz codec.

Owns the fields of `config.json` that are not every decoder's, the sum that each position is, the
rules of the first code, and the model's memory. The whole text is in the prompt; frames follow,
each the sum of its codes and of the text's padding. The codec is in the model's folder as
`speech_tokenizer`. Knows no scheduler.

Shapes: R rows, T positions, X positions of a prompt, Q codes, C hidden, E text hidden, V codebook,
S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import silu

from triptych.core.engine_api.frames import FIRST_FRAME_ID, StepCodes, frame_id
from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Positive,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.decoders.native import position_values
from triptych.core.runtime.decoders.tensor_names import stack_targets
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import HeadNormConfig, KvCache, PagedStep
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.sampling.sampler import LOGIT_BYTES, FrameSampler
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.weights.encoding import WeightEncoding
from triptych.core.weights.layout import read_json
from triptych.modalities.tts.configs.qwen3_tts import (
    CODEC_FOLDER,
    NUM_SPECIAL,
    QwenTtsConfig,
    read_qwen_config,
)
from triptych.modalities.tts.engine.codecs.encode_memory import longest_recording
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.codecs.mimi_encoder import MimiEncoder
from triptych.modalities.tts.engine.codecs.protocol import SpeechCodec
from triptych.modalities.tts.engine.frame_head import FrameInputs, FrameSamples
from triptych.modalities.tts.engine.models.blueprint import (
    FrameBlueprint,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.codebooks import Codebooks
from triptych.modalities.tts.engine.models.depth import DepthDecoder, depth_layout
from triptych.modalities.tts.engine.models.qwen_speaker import (
    SAMPLE_RATE,
    RecordedSpeakers,
    SpeakerEncoder,
    SpeakerFields,
    vector_bytes,
)
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip

_LEAST_FRAMES = 2
"""Speech ends after this many frames at the earliest, as in the released package."""
_PENALTY = 1.05
"""The released package's penalty for first codes that a segment has already."""


class _QwenDecoderFields(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of either decoder: those of a Qwen3."""

    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)] = 32_768
    text_hidden_size: int = 2048


class QwenTtsDecoders(msgspec.Struct, frozen=True, kw_only=True):
    """The configurations of the two decoders, and the fields of the model."""

    fields: QwenTtsConfig
    text_hidden_size: int
    talker: DecoderConfig
    depth: DecoderConfig
    penalty: Positive = _PENALTY
    speaker: SpeakerFields | None = None
    """Of a model that speaks in the voices of recordings."""

    @property
    def num_sampled(self) -> int:
        """Codes of a codebook; of the first, its end follows them in our logits."""
        return self.depth.vocab_size

    @classmethod
    def read(
        cls, config: Mapping[str, Any], *, max_length: int = 0, penalty: float = _PENALTY
    ) -> QwenTtsDecoders:
        """Translate `config.json`. Raises `WeightsError` that names the field."""
        fields = read_qwen_config(config)
        talker_config = config["talker_config"]
        talker = parse(_plain(talker_config), _QwenDecoderFields)
        depth_config = dict(talker_config.get("code_predictor_config") or {})
        ids = fields.talker_config
        depth_config["max_position_embeddings"] = ids.num_code_groups
        depth = parse({**depth_config, "rope_scaling": None}, _QwenDecoderFields)
        if depth_config.get("num_code_groups", ids.num_code_groups) != ids.num_code_groups:
            raise WeightsError("config.json: code_predictor_config does not fit its talker.")
        if ids.vocab_size - NUM_SPECIAL != depth.vocab_size:
            raise WeightsError(
                "config.json: the first codebook must have as many codes as the others, and"
                f" {NUM_SPECIAL} entries that are no sound."
            )
        return cls(
            fields=fields,
            text_hidden_size=talker.text_hidden_size,
            talker=_decoder(talker, max_length),
            depth=_decoder(depth, ids.num_code_groups),
            penalty=penalty,
            speaker=_speaker(config, talker) if fields.tts_model_type == "base" else None,
        )


def _speaker(config: Mapping[str, Any], talker: _QwenDecoderFields) -> SpeakerFields:
    try:
        speaker = convert(dict(config.get("speaker_encoder_config") or {}), SpeakerFields)
    except msgspec.ValidationError as error:
        raise WeightsError(f"config.json: speaker_encoder_config is not usable: {error}.") from None
    if speaker.enc_dim != talker.hidden_size:
        raise WeightsError("config.json: speaker_encoder_config does not fit its talker.")
    return speaker


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without positions on several axes: they are equal for speech, as in one."""
    rope = config.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "mrope"):
        raise WeightsError(f"config.json: rope_type {kind!r} is not supported in a Qwen3-TTS.")
    return {**config, "rope_scaling": None}


def _decoder(fields: _QwenDecoderFields, max_length: int) -> DecoderConfig:
    layer = replace(attention_of(fields), head_norm=HeadNormConfig(eps=fields.rms_norm_eps))
    return decoder_of(fields, (layer,) * fields.num_hidden_layers, max_length)


class QwenTtsModel:
    """A `frame_head.FrameModel`. Fill `targets`, then call `prepare` once."""

    def __init__(
        self,
        config: QwenTtsDecoders,
        speakers: RecordedSpeakers,
        *,
        max_batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ids, width = config.fields.talker_config, config.talker.hidden_size
        self.config = config
        self.num_codes = ids.num_code_groups
        self._num_sampled = config.num_sampled
        self._text_size = ids.text_vocab_size
        sizes = [ids.vocab_size, *[config.num_sampled] * (self.num_codes - 1)]
        self.codebooks = Codebooks(sizes, width, dtype=dtype, device=device)
        text_width = config.text_hidden_size
        self.text_WE = torch.empty(self._text_size, text_width, dtype=dtype, device=device)
        self.text_in = Linear(text_width, text_width, has_bias=True, dtype=dtype, device=device)
        self.text_out = Linear(text_width, width, has_bias=True, dtype=dtype, device=device)
        self.talker = DecoderStack(config.talker, dtype=dtype, device=device)
        self.head = Linear(width, ids.vocab_size, has_bias=False, dtype=dtype, device=device)
        depth_width = config.depth.hidden_size
        projector = None
        if depth_width != width:
            projector = Linear(width, depth_width, has_bias=True, dtype=dtype, device=device)
        self.depth = DepthDecoder(
            config.depth,
            self.codebooks,
            projector,
            num_sampled=config.num_sampled,
            max_batch_size=max_batch_size,
        )
        self._first_S = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        seen_shape = (max_batch_size, config.num_sampled + 1)
        self._is_seen_SV = torch.zeros(seen_shape, dtype=torch.bool, device=device)
        self.sample_state: Sequence[torch.Tensor] = (self._is_seen_SV,)
        self._speakers = speakers
        self.speaker_encoder: SpeakerEncoder | None = None
        if config.speaker is not None:
            shape = (max_batch_size, width)
            self._speakers_SC = torch.zeros(shape, dtype=dtype, device=device)
            with device:
                self.speaker_encoder = SpeakerEncoder(config.speaker).eval().requires_grad_(False)

    def targets(self, encoding: WeightEncoding) -> Iterator[Target]:
        """Every tensor and its destination; the layers' are held as `encoding` says."""
        talker, predictor = "talker.model", "talker.code_predictor"
        first, *others = self.codebooks.tables
        yield TensorTarget(f"{talker}.codec_embedding.weight", first)
        for index, table in enumerate(others):
            yield TensorTarget(f"{predictor}.model.codec_embedding.{index}.weight", table)
            head = f"{predictor}.lm_head.{index}.weight"
            yield TensorTarget(head, self.depth.heads_QVD[index])
        yield TensorTarget(f"{talker}.text_embedding.weight", self.text_WE)
        yield from _linear_targets("talker.text_projection.linear_fc1", self.text_in)
        yield from _linear_targets("talker.text_projection.linear_fc2", self.text_out)
        yield from _linear_targets("talker.codec_head", self.head)
        if self.depth.projector is not None:
            yield from _linear_targets(f"{predictor}.small_to_mtp_projection", self.depth.projector)
        yield from stack_targets(self.talker, talker, encoding)
        yield from stack_targets(self.depth.stack, f"{predictor}.model", encoding)
        if self.speaker_encoder is not None:
            for name, parameter in self.speaker_encoder.named_parameters():
                yield TensorTarget(f"speaker_encoder.{name}", parameter.data)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        eos_id = self.config.fields.talker_config.codec_eos_token_id
        head_VC = self.head.weight_OI
        self.head = Linear.of(torch.cat((head_VC[: self._num_sampled], head_VC[eos_id, None])))
        for linear in (self.text_in, self.text_out, self.head):
            linear.prepare(native)
        self.talker.prepare(native)
        self.depth.prepare(native)
        pad_1 = torch.tensor([self.config.fields.tts_pad_token_id], device=self.text_WE.device)
        self._pad_1C = self._text(pad_1)

    def bind(self, slot: int, prompt_ids: Sequence[int], sampled: Sequence[StepCodes]) -> None:
        """Set where a row's speech begins, who speaks, and which first codes it has had."""
        self._first_S[slot] = len(prompt_ids)
        number = self._recorded(prompt_ids)
        if number is not None:
            self._speakers_SC[slot] = self._speakers.vector(number).to(self._speakers_SC)
        is_seen_V = self._is_seen_SV[slot]
        is_seen_V.zero_()
        if sampled:
            firsts = sorted({codes[0] for codes in sampled})
            is_seen_V[torch.tensor(firsts, device=is_seen_V.device)] = True

    def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
        """`hidden_TC` of the talker."""
        x_TC = self.codebooks(inputs.codes_FQ) + self._pad_1C
        if len(inputs.text_ids_X):
            frames_FC = x_TC
            x_TC = frames_FC.new_empty(len(inputs.positions_T), frames_FC.shape[1])
            x_TC.index_copy_(0, inputs.frame_index_F, frames_FC)
            slots_X = inputs.slots_T.index_select(0, inputs.text_index_X)
            x_TC.index_copy_(0, inputs.text_index_X, self._prompt(inputs.text_ids_X, slots_X))
        return self.talker.run(x_TC, inputs.positions_T, PagedStep(kv, inputs.batch))

    def sample(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> FrameSamples:
        """The first code from the talker, the others from the depth decoder.

        The first is sampled with the penalties of `transformers`, in its order.
        """
        slots_R, end = sampler.slots_B, self._num_sampled
        logits_RV = self.head(hidden_RC).float()
        is_seen_RV = self._is_seen_SV.index_select(0, slots_R)
        penalty = self.config.penalty
        punished_RV = torch.where(logits_RV < 0, logits_RV * penalty, logits_RV / penalty)
        logits_RV = torch.where(is_seen_RV, punished_RV, logits_RV)
        is_early_R = positions_R - self._first_S.index_select(0, slots_R) < _LEAST_FRAMES
        logits_RV[:, end] = logits_RV[:, end].masked_fill(is_early_R, torch.finfo().min)
        first_R = sampler.sample(logits_RV, 0)
        is_seen_RV = is_seen_RV.scatter(1, first_R[:, None], value=True)
        self._is_seen_SV.index_copy_(0, slots_R, is_seen_RV)
        codes_RQ = self.depth.sample(hidden_RC, first_R.clamp(max=end - 1), sampler)
        return FrameSamples(codes_RQ, first_R == end)

    def _recorded(self, prompt_ids: Sequence[int]) -> int | None:
        """The number of the recorded speaker in a prompt, if there is one."""
        if self.speaker_encoder is None:
            return None
        fields = self.config.fields
        first_id = fields.pair(0, fields.recorded)
        found = (token_id for token_id in prompt_ids if first_id <= token_id < FIRST_FRAME_ID)
        speaker_id = next(found, None)
        return None if speaker_id is None else (speaker_id - first_id) // self._text_size

    def _prompt(self, ids_X: torch.Tensor, slots_X: torch.Tensor) -> torch.Tensor:
        """`x_XC` of ids of `configs.qwen3_tts`."""
        x_XC = self._text(ids_X % self._text_size)
        codes_X = ids_X // self._text_size - 1
        table_VC = self.codebooks.tables[0]
        codec_XC = table_VC.index_select(0, codes_X.clamp(0, len(table_VC) - 1))
        if self.speaker_encoder is not None:
            is_speaker_X1 = (codes_X >= len(table_VC))[:, None]
            codec_XC = self._speakers_SC.index_select(0, slots_X).where(is_speaker_X1, codec_XC)
        sum_XC: torch.Tensor = x_XC + codec_XC.masked_fill((codes_X < 0)[:, None], 0)
        return sum_XC

    def _text(self, ids_X: torch.Tensor) -> torch.Tensor:
        """`x_XC` of tokens of the text."""
        return self.text_out(silu(self.text_in(self.text_WE.index_select(0, ids_X))))


def _linear_targets(name: str, linear: Linear) -> Iterator[Target]:
    yield TensorTarget(f"{name}.weight", linear.weight_OI)
    if linear.bias_O is not None:
        yield TensorTarget(f"{name}.bias", linear.bias_O)


def _penalty(file: Path) -> float:
    """The repetition penalty of a model, by default the package's. Raises `WeightsError`."""
    penalty = read_json(file).get("repetition_penalty", _PENALTY) if file.is_file() else _PENALTY
    if not isinstance(penalty, float | int) or not penalty > 0:
        raise WeightsError("generation_config.json: repetition_penalty must be a number above 0.")
    return float(penalty)


class QwenTtsBlueprint(FrameBlueprint[QwenTtsModel]):
    """A checkpoint of `Qwen3TTSForConditionalGeneration` ."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        penalty = _penalty(setup.folder / "generation_config.json")
        self.config = QwenTtsDecoders.read(config, max_length=setup.max_length, penalty=penalty)
        super().__init__(
            setup,
            self.config.talker,
            num_codebooks=self.config.fields.talker_config.num_code_groups,
            num_logits=self.config.num_sampled + 1,
        )
        self.traits = SpeechTraits()
        self.codec = HubCodec(setup.folder / CODEC_FOLDER, setup.options, native=setup.native)
        self._speakers = RecordedSpeakers()
        self._model: QwenTtsModel | None = None
        is_cloning = self.config.speaker is not None
        self._encoder = MimiEncoder(setup.folder / CODEC_FOLDER) if is_cloning else None

    def weight_bytes(self) -> int:
        """Bytes of the parameters, of the depth decoder's pages, and of the state of slots."""
        page_bytes = depth_layout(self.config.depth, self._setup.dtype).page_bytes
        num_slots = self._setup.max_batch_size
        seen_bytes = num_slots * (self.config.num_sampled + 1 + 8)
        return super().weight_bytes() + page_bytes * (num_slots + 1) + seen_bytes

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Peak memory of a step; codes are sampled one at a time."""
        num_values = num_tokens * position_values(self.config.talker)
        num_values += num_tokens * 2 * self.config.text_hidden_size
        num_values += num_rows * position_values(self.config.depth)
        return num_values * self._setup.dtype.itemsize + LOGIT_BYTES * num_rows * self.num_logits

    def construct(self, device: torch.device) -> QwenTtsModel:
        """Construct the model with uninitialized parameters."""
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return QwenTtsModel(
            self.config, self._speakers, max_batch_size=num_slots, dtype=dtype, device=device
        )

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> QwenTtsModel:
        """Load the weights; see `FrameBlueprint.build`."""
        self._model = super().build(checkpoint, report)
        return self._model

    def targets(self, model: QwenTtsModel, names: Collection[str] = ()) -> Iterable[Target]:
        """Every tensor has one name."""
        return model.targets(self._setup.encoding)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is of the speaker encoder, in a model whose voices have names."""
        return name.startswith("speaker_encoder.") and self.config.speaker is None

    def codec_bytes(self) -> int:
        """Bytes of the codec's weights."""
        encoder = self._encoder
        return self.codec.num_bytes() + (0 if encoder is None else encoder.num_bytes())

    def codec_state_bytes(self, num_rows: int) -> int:
        """Bytes of the state of `num_rows` streams in the codec."""
        return self.codec.state_bytes(num_rows)

    def encode_bytes(self) -> int:
        """Peak memory of the speaker's vector and of the codes, one after the other."""
        if self._encoder is None or self.config.speaker is None:
            return 0
        num_samples = longest_recording(SAMPLE_RATE)
        return max(self._encoder.encode_bytes(), vector_bytes(self.config.speaker, num_samples))

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the codec, with its encoder where the model imitates recordings."""
        device = self._setup.device
        codec = self.codec.open(
            device, report, num_rows=num_rows, num_codebooks=self._num_codebooks
        )
        if self._encoder is None:
            return codec
        self._encoder.load(device)
        return replace(codec, encode=self._encode)

    def _encode(self, pcm_S: torch.Tensor) -> torch.Tensor:
        """A recording as `voice_prompt` reads it: the speaker's vector, then the codes, as floats.

        Both are exact: codes are small.
        """
        assert self._model is not None, "recordings come after loading"
        assert self._model.speaker_encoder is not None, "a codec with an encoder has both"
        assert self._encoder is not None, "a codec with an encoder has both"
        vector_C = self._model.speaker_encoder.vector(pcm_S)
        codes_FQ = self._encoder(pcm_S)[: self._num_codebooks].T
        return torch.cat((vector_C, codes_FQ.flatten().to(vector_C)))

    def voice_prompt(self, clip: VoiceClip, encoded: NDArray[Any]) -> VoicePrompt:
        """The clip's turn with its speaker, and after the text the clip's sound, if it has words.

        Without words the speaker's vector alone imitates the voice.
        """
        assert self.config.speaker is not None, "a codec with an encoder has both"
        fields, size = self.config.fields, self.config.speaker.enc_dim
        number = self._speakers.add(clip.digest, torch.from_numpy(encoded[:size].copy()))
        text_size = fields.talker_config.text_vocab_size
        recorded_id = fields.pair(fields.tts_pad_token_id, fields.recorded)
        prompt_ids = tuple(
            token_id + number * text_size if token_id == recorded_id else token_id
            for token_id in clip.prompt_ids
        )
        last_id = fields.pair(fields.tts_bos_token_id, fields.talker_config.codec_pad_id)
        if clip.prompt_ids[-1] == last_id:  # the opening alone: no words
            return VoicePrompt(prompt_ids=prompt_ids, suffix_ids=(fields.begin,))
        codes = encoded[size:].astype(np.int64).reshape(-1, self._num_codebooks)
        frames = tuple(map(tuple, codes.tolist()))
        suffix_ids = (fields.begin, *map(frame_id, frames))
        return VoicePrompt(prompt_ids=prompt_ids, suffix_ids=suffix_ids, codes=frames)

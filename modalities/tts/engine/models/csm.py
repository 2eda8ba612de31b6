"""CSM: two transformers, with one position per frame and one per code of the frame; and Mimi.

Owns the fields of `config.json` that are not every decoder's, and the model's memory. The loop over
a frame's codes is `depth`'s. Knows no scheduler.

Shapes: R rows, T positions, Q codes, C backbone hidden, V codebook, W words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch

from triptych.core.engine_api.frames import StepCodes
from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.decoders.native import position_values
from triptych.core.runtime.decoders.tensor_names import stack_targets
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache, PagedStep
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.sampling.sampler import LOGIT_BYTES, FrameSampler
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.frame_head import FrameInputs, FrameSamples
from triptych.modalities.tts.engine.models.blueprint import (
    CloningBlueprint,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.codebooks import Codebooks, embed_inputs
from triptych.modalities.tts.engine.models.depth import DepthDecoder, depth_layout

Id = Annotated[int, msgspec.Meta(ge=0)]

_MIMI_CODES = 2048  # the default of Mimi's configuration


class _Transformer(CausalLmConfig, frozen=True, kw_only=True):
    rope_theta: Positive = 500_000.0
    rms_norm_eps: Positive = 1e-5


class _DepthFields(_Transformer, frozen=True, kw_only=True):
    num_codebooks: Count
    backbone_hidden_size: Count


class CsmFields(_Transformer, frozen=True, kw_only=True):
    """The fields of a checkpoint's config.json. `vocab_size` is that of a codebook."""

    depth_decoder_config: dict[str, Any]
    codec_config: dict[str, Any]
    num_codebooks: Count = 32
    text_vocab_size: Count = 128_256
    codebook_eos_token_id: Id = 0
    audio_token_id: Id = 128_002
    audio_eos_token_id: Id = 128_003
    bos_token_id: Id = 128_000
    tie_codebooks_embeddings: bool = True


class CsmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configurations of the two decoders.

    Codes from `num_sampled` on are embedded and never sampled: they are outside of Mimi's
    codebooks.
    """

    fields: CsmFields
    num_sampled: int
    backbone: DecoderConfig
    depth: DecoderConfig

    @classmethod
    def read(cls, config: Mapping[str, Any], *, max_length: int = 0) -> CsmConfig:
        """Translate `config.json`; `max_length` 0 takes the model's own context.

        Raises `WeightsError` that names the field.
        """
        fields = parse(config, CsmFields)
        depth = parse({**fields.depth_decoder_config}, _DepthFields)
        same = (fields.num_codebooks, fields.vocab_size, fields.hidden_size)
        if (depth.num_codebooks, depth.vocab_size, depth.backbone_hidden_size) != same:
            raise WeightsError("config.json: depth_decoder_config does not fit its backbone.")
        if not fields.tie_codebooks_embeddings:
            raise WeightsError("config.json: tie_codebooks_embeddings false is not supported.")
        codec_size = int(fields.codec_config.get("codebook_size", _MIMI_CODES))
        return cls(
            fields=fields,
            num_sampled=min(fields.vocab_size, codec_size),
            backbone=_decoder(fields, max_length),
            depth=_decoder(depth, depth.num_codebooks),
        )


def _decoder(fields: CausalLmConfig, max_length: int) -> DecoderConfig:
    attention = (attention_of(fields),) * fields.num_hidden_layers
    return decoder_of(fields, attention, max_length)


class CsmModel:
    """A `frame_head.FrameModel`. Fill `targets`, then call `prepare` once."""

    def __init__(
        self, config: CsmConfig, *, max_batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        fields = config.fields
        self.num_codes = fields.num_codebooks
        self.sample_state: Sequence[torch.Tensor] = ()
        self._num_sampled = config.num_sampled
        self._eos_id = fields.codebook_eos_token_id
        self._audio_eos_id = fields.audio_eos_token_id
        width, size = fields.hidden_size, fields.vocab_size
        self.text_WC = torch.empty(fields.text_vocab_size, width, dtype=dtype, device=device)
        self.codebooks = Codebooks([size] * self.num_codes, width, dtype=dtype, device=device)
        self.backbone = DecoderStack(config.backbone, dtype=dtype, device=device)
        self.head = Linear(width, size, has_bias=False, dtype=dtype, device=device)
        projector = Linear(
            width, config.depth.hidden_size, has_bias=False, dtype=dtype, device=device
        )
        self.depth = DepthDecoder(
            config.depth,
            self.codebooks,
            projector,
            num_sampled=config.num_sampled,
            max_batch_size=max_batch_size,
        )

    def targets(self, codebooks_name: str, encoding: WeightEncoding) -> Iterator[Target]:
        """Every tensor and its destination; the layers' are held as `encoding` says.

        `codebooks_name` is the name of the codes' table in the checkpoint.
        """
        yield TensorTarget("embed_text_tokens.weight", self.text_WC)
        yield TensorTarget(codebooks_name, self.codebooks.weight_EC)
        yield TensorTarget("lm_head.weight", self.head.weight_OI)
        yield from stack_targets(self.backbone, "backbone_model", encoding)
        depth, prefix = self.depth, "depth_decoder"
        yield from stack_targets(depth.stack, f"{prefix}.model", encoding)
        assert depth.projector is not None, "CSM has one always"
        projector = f"{prefix}.model.inputs_embeds_projector.weight"
        yield TensorTarget(projector, depth.projector.weight_OI)
        yield TensorTarget(f"{prefix}.codebooks_head.weight", depth.heads_QVD.transpose(1, 2))

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        # A frame of end codes marks the end of a voice's sound; a word of the prompt represents it.
        eos_1Q = torch.full((1, self.num_codes), self._eos_id, device=self.text_WC.device)
        self.text_WC[self._audio_eos_id] = self.codebooks(eos_1Q)[0]
        self.backbone.prepare(native)
        self.head.prepare(native)
        self.depth.prepare(native)

    def bind(self, slot: int, prompt_ids: Sequence[int], sampled: Sequence[StepCodes]) -> None:
        """Do nothing: the pages of the depth decoder are written before they are read."""

    def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
        """`hidden_TC` of the backbone."""
        x_TC = embed_inputs(inputs, self.text_WC, self.codebooks)
        return self.backbone.run(x_TC, inputs.positions_T, PagedStep(kv, inputs.batch))

    def sample(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> FrameSamples:
        """The first code from the backbone, the others from the depth decoder."""
        first_R = sampler.sample(self.head(hidden_RC)[:, : self._num_sampled], 0)
        codes_RQ = self.depth.sample(hidden_RC, first_R, sampler)
        return FrameSamples(codes_RQ, self.is_end(codes_RQ))

    def is_end(self, codes_RQ: torch.Tensor) -> torch.Tensor:
        """Whether all codes of a frame except the last are end codes, as in transformers."""
        return (codes_RQ[:, :-1] == self._eos_id).all(-1)


_CODEBOOK_NAMES = (
    "depth_decoder.model.embed_tokens.weight",
    "backbone_model.embed_tokens.embed_audio_tokens.weight",
)
CODEC_PREFIX = "codec_model."
_CONTEXT_STEPS = 250  # 20 s: without context, the voice would change with each segment


class CsmBlueprint(CloningBlueprint[CsmModel]):
    """A checkpoint of `CsmForConditionalGeneration`, which includes Mimi."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        self.config = CsmConfig.read(config, max_length=setup.max_length)
        fields = self.config.fields
        super().__init__(
            setup,
            self.config.backbone,
            num_codebooks=fields.num_codebooks,
            num_logits=fields.vocab_size,
        )
        self.clip_end_ids = (fields.audio_eos_token_id,)
        self.traits = SpeechTraits(
            num_context_steps=_CONTEXT_STEPS, context_end_ids=self.clip_end_ids
        )
        self.codec = HubCodec(
            setup.folder,
            setup.options,
            config=fields.codec_config,
            prefix=CODEC_PREFIX,
            native=setup.native,
        )

    def weight_bytes(self) -> int:
        """Bytes of the parameters, and of the depth decoder's pages."""
        page_bytes = depth_layout(self.config.depth, self._setup.dtype).page_bytes
        return super().weight_bytes() + page_bytes * (self._setup.max_batch_size + 1)

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Peak memory of a step; codes are sampled one at a time."""
        num_values = num_tokens * position_values(self.config.backbone)
        num_values += num_rows * position_values(self.config.depth)
        return num_values * self._setup.dtype.itemsize + LOGIT_BYTES * num_rows * self.num_logits

    def construct(self, device: torch.device) -> CsmModel:
        """Construct the model with uninitialized parameters."""
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return CsmModel(self.config, max_batch_size=num_slots, dtype=dtype, device=device)

    def targets(self, model: CsmModel, names: Collection[str] = ()) -> Iterable[Target]:
        """Both decoders share a table of codes, which a checkpoint has under one name or both."""
        held = [name for name in _CODEBOOK_NAMES if name in names] or _CODEBOOK_NAMES
        return model.targets(held[0], self._setup.encoding)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is the codec's, or the second copy of the codes' table."""
        return name.startswith(CODEC_PREFIX) or name in _CODEBOOK_NAMES

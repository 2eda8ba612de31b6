"""CSM: two transformers, with one position per frame and one per code of the frame; and Mimi.

Owns the fields of `config.json` that are not every decoder's, the frame's inner loop, and the
model's memory. The depth decoder attends only to its own frame, so its cache is one page per slot,
rewritten each time; the loop over codes runs for all rows at once and is one unit of work of a
step. Knows no scheduler.

Shapes: R rows, T positions, Q codes, C backbone hidden, D depth hidden, V codebook, W words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
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
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.layers.attention import KvCache, KvLayout, PagedStep
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
        self.codebooks = Codebooks(self.num_codes, size, width, dtype=dtype, device=device)
        self.backbone = DecoderStack(config.backbone, dtype=dtype, device=device)
        self.head = Linear(width, size, has_bias=False, dtype=dtype, device=device)
        self.depth = DepthDecoder(
            config, self.codebooks, max_batch_size=max_batch_size, dtype=dtype, device=device
        )

    def targets(self, codebooks_name: str, encoding: WeightEncoding) -> Iterator[Target]:
        """Every tensor and its destination; the layers' are held as `encoding` says.

        `codebooks_name` is the name of the codes' table in the checkpoint.
        """
        yield TensorTarget("embed_text_tokens.weight", self.text_WC)
        yield TensorTarget(codebooks_name, self.codebooks.weight_EC)
        yield TensorTarget("lm_head.weight", self.head.weight_OI)
        yield from stack_targets(self.backbone, "backbone_model", encoding)
        yield from self.depth.targets("depth_decoder", encoding)

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


class DepthDecoder:
    """Generates a frame's codes one after another, from the backbone's hidden state."""

    def __init__(
        self,
        config: CsmConfig,
        codebooks: Codebooks,
        *,
        max_batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        depth, self._num_sampled = config.depth, config.num_sampled
        self._num_codes = depth.rope.max_length
        self._codebooks = codebooks
        self._stack = DecoderStack(depth, dtype=dtype, device=device)
        backbone_size, width = codebooks.weight_EC.shape[1], depth.hidden_size
        self._projector = Linear(backbone_size, width, has_bias=False, dtype=dtype, device=device)
        shape = (self._num_codes - 1, depth.vocab_size, width)
        self._heads_QVD = torch.empty(shape, dtype=dtype, device=device)
        self._heads: list[Linear] = []
        self._layout = depth_layout(depth, dtype)
        self._max_batch_size = max_batch_size
        self._positions_Q = torch.arange(self._num_codes, device=device)

    def targets(self, prefix: str, encoding: WeightEncoding) -> Iterator[Target]:
        """The targets of the depth decoder; see `CsmModel.targets`."""
        yield from stack_targets(self._stack, f"{prefix}.model", encoding)
        yield TensorTarget(
            f"{prefix}.model.inputs_embeds_projector.weight", self._projector.weight_OI
        )
        yield TensorTarget(f"{prefix}.codebooks_head.weight", self._heads_QVD.transpose(1, 2))

    def prepare(self, native: NativeKernels | None) -> None:
        """Prepare the weights as `CsmModel.prepare`, and allocate the cache."""
        self._stack.prepare(native)
        self._projector.prepare(native)
        self._heads = [Linear.of(weight_VD) for weight_VD in self._heads_QVD]
        del self._heads_QVD
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
        return self._stack.run(self._projector(x_RC), positions_R, PagedStep(self._kv, batch))


def depth_layout(config: DecoderConfig, dtype: torch.dtype) -> KvLayout:
    """A cache whose pages hold a whole frame each."""
    return config.kv_layout(1 << (config.rope.max_length - 1).bit_length(), dtype)


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

"""Higgs Audio V2's decoder: one attention, and an MLP with norms of its own for words and sound.

Owns the choice between the two by position, and the delay pattern. A step of one kind alone runs
through the stack of that kind, in one native call where there is one; only where words and sound
share a step are their positions parted at each layer. Knows no codec and no scheduler.

Codebook c says at step k of a segment the code of frame k - c - 1: steps 0 to c say a mark of the
beginning, and once a step has said the mark of the end, codebook 0 goes on saying it, a step later
codebook 1 too, and so on; a step of these marks alone is the end.

Shapes: R rows, T positions, X words, F frames, Q codebooks, V entries of one, C hidden, W words of
the vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from triptych.core.decoders.tensor_names import mlp_targets, stack_targets
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import KvCache, PagedStep
from triptych.core.layers.decoder import DecoderLayer, DecoderStack
from triptych.core.layers.linear import Linear
from triptych.core.plan import StepCodes
from triptych.core.sampling.sampler import FrameSampler
from triptych.core.weights.tensors.loading import TensorTarget
from triptych.modalities.tts.engine.frame_head import FrameDraws, FrameInputs
from triptych.modalities.tts.engine.models.codebooks import Codebooks, embed_inputs
from triptych.modalities.tts.engine.models.higgs.config import HiggsConfig


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
        self.codebooks = Codebooks(self.num_codes, self._size, width, dtype=dtype, device=device)
        self.words = DecoderStack(config.decoder, dtype=dtype, device=device)
        self.sound = DecoderStack(config.decoder, dtype=dtype, device=device)
        self.sound.norm = self.words.norm
        for theirs, ours in zip(self.words.layers, self.sound.layers, strict=True):
            ours.attention = theirs.attention
        num_logits = self.num_codes * self._size
        self.head = Linear(width, num_logits, has_bias=False, dtype=dtype, device=device)
        self._first_S = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._num_ended_S = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._order_Q = torch.arange(self.num_codes, device=device)

    def targets(self) -> Iterator[TensorTarget]:
        """Every tensor, and the view it goes to."""
        yield TensorTarget("model.embed_tokens.weight", self.text_WC)
        name = "model.embed_audio_tokens.embed_audio_tokens.weight"
        yield TensorTarget(name, self.codebooks.weight_EC)
        yield TensorTarget("audio_lm_head.weight", self.head.weight_OI)
        yield from stack_targets(self.words, "model")
        for index, layer in enumerate(self.sound.layers):
            prefix = f"model.layers.{index}.audio"
            yield TensorTarget(f"{prefix}_input_layernorm.weight", layer.input_norm.weight_C)
            yield TensorTarget(f"{prefix}_post_attention_layernorm.weight", layer.mlp_norm.weight_C)
            yield from mlp_targets(f"{prefix}_mlp", layer.mlp)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.words.prepare(native)
        self.sound.prepare(native)
        self.head.prepare(native)

    def bind(self, slot: int, prompt_ids: Sequence[int], drawn: Sequence[StepCodes]) -> None:
        """Where the row's segment begins, and how long it has been ending."""
        self._first_S[slot] = len(prompt_ids)
        has_end = [self._end_id in codes for codes in drawn]
        self._num_ended_S[slot] = len(drawn) - has_end.index(True) if any(has_end) else 0

    def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
        """`hidden_TC`."""
        x_TC = embed_inputs(inputs, self.text_WC, self.codebooks)
        positions_T = inputs.positions_T
        if not len(inputs.text_ids_X):
            return self.sound.run(x_TC, positions_T, PagedStep(kv, inputs.batch))
        if not len(inputs.codes_FQ):
            return self.words.run(x_TC, positions_T, PagedStep(kv, inputs.batch))
        cos_sin = self.words.rotations(positions_T)
        for words, sound in zip(self.words.layers, self.sound.layers, strict=True):
            normed_TC = torch.empty_like(x_TC)
            for layer, index in _kinds(words, sound, inputs):
                normed_TC.index_copy_(0, index, layer.input_norm(x_TC.index_select(0, index)))
            x_TC = words.attention(normed_TC, x_TC, cos_sin, PagedStep(kv, inputs.batch))
            for layer, index in _kinds(words, sound, inputs):
                part = x_TC.index_select(0, index)
                x_TC.index_copy_(0, index, layer.mlp(layer.mlp_norm(part), part))
        return self.words.norm(x_TC)

    def draw(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> FrameDraws:
        """All codes at once, and the marks that the delay pattern has in their places."""
        logits_RQV = self.head(hidden_RC).view(-1, self.num_codes, self._size)
        slots_R = sampler.slots_B
        step_R1 = (positions_R - self._first_S[slots_R])[:, None]
        num_ended_R = self._num_ended_S[slots_R]
        codes_RQ = sampler.draw_all(logits_RQV)
        codes_RQ = torch.where(self._order_Q >= step_R1, self._begin_id, codes_RQ)
        codes_RQ = torch.where(self._order_Q < num_ended_R[:, None], self._end_id, codes_RQ)
        is_mark_RQ = codes_RQ == self._end_id
        is_ending_R = is_mark_RQ.any(-1) | (num_ended_R > 0)
        self._num_ended_S.index_copy_(0, slots_R, num_ended_R + is_ending_R)
        return FrameDraws(codes_RQ, is_mark_RQ.all(-1))


def _kinds(
    words: DecoderLayer, sound: DecoderLayer, inputs: FrameInputs
) -> tuple[tuple[DecoderLayer, torch.Tensor], tuple[DecoderLayer, torch.Tensor]]:
    return (words, inputs.text_index_X), (sound, inputs.frame_index_F)

"""The embedded voice's acoustic LM: speech tokens from phonemes, on the paged cache.

Owns the alignment with the phonemes, the decoder's input and output layers, and each slot's
alignment at each position. Implements `engine.frame_head.FrameModel`: a frame is the codes of one
step. A prompt is the sentence's symbol ids with pads around them, then `start_id`.

A sequence is the sentence's symbols (with pads), one start mark, then a position per step of 50 ms.
The inputs of a step are the symbols around the current one, the number of steps it has been
current, and the codes of the previous step; its outputs are the step's codes and the number of
symbols by which the alignment advances (0, 1 or 2: no symbol is shorter than half a step). So no
symbol can be skipped or repeated, and the sentence ends when all are spoken.

The inputs of a position include later symbols, so prompts with equal beginnings must not share
pages: run it without prefix caching.

Shapes: T positions, X prompt positions, F step positions, R rows, S slots, W symbols of a window, L
levels (or positions of a sentence), Q codebooks, A advances, P padded symbols, C hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from triptych.core.engine_api.frames import StepCodes
from triptych.core.runtime.decoders.projection_targets import AS_STORED
from triptych.core.runtime.decoders.tensor_names import stack_targets
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import AttentionConfig, KvCache, PagedStep
from triptych.core.runtime.layers.decoder import DecoderStack
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.layers.rotary import RopeConfig
from triptych.core.runtime.sampling.sampler import FrameSampler
from triptych.core.runtime.tensors.loading import Target, TensorTarget
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.tts.configs.voice import AcousticConfig, CodecConfig, VoiceConfig
from triptych.modalities.tts.engine.frame_head import FrameInputs, FrameSamples


class Kind(IntEnum):
    """The kind of a position."""

    SYMBOL = 0
    START = 1
    STEP = 2


class AcousticPositions(NamedTuple):
    """The inputs of positions; leading dims may be any.

    `windows` [..., W] are the symbols around the current one, `held` the number of steps it has
    been current, `values` [..., Q] the codes of the previous step as values in [-1, 1]; `kinds`
    select which of them are used.
    """

    windows: Tensor
    held: Tensor
    values: Tensor
    kinds: Tensor


class Scores(NamedTuple):
    """Logits of the codes [..., Q, L] and of the advance [..., A]."""

    codes: Tensor
    advance: Tensor


class AcousticInput(nn.Module):
    """Embeds the inputs of positions."""

    def __init__(self, config: AcousticConfig, codec: CodecConfig) -> None:
        super().__init__()
        width = config.num_symbols_before + 1 + config.num_symbols_after
        hidden = config.hidden_size
        self.symbols = nn.Embedding(config.num_symbols + 1, config.symbol_dim)
        self.context = nn.Linear(width * config.symbol_dim, hidden, bias=False)
        self.held = nn.Embedding(config.max_held + 2, hidden)
        self.codes = nn.Linear(codec.num_codebooks, hidden, bias=False)
        self.kinds = nn.Embedding(len(Kind), hidden)

    def forward(self, positions: AcousticPositions) -> Tensor:
        """The embeddings [..., C] of positions."""
        symbols = self.symbols(positions.windows).flatten(-2)
        is_step = (positions.kinds == Kind.STEP)[..., None]
        values = (positions.values * is_step).to(self.codes.weight.dtype)
        held = self.held(torch.where(positions.kinds == Kind.SYMBOL, 0, positions.held + 1))
        x: Tensor = self.context(symbols) + held + self.codes(values) + self.kinds(positions.kinds)
        return x


class AcousticOutput(nn.Module):
    """Computes the logits of a position."""

    def __init__(self, config: AcousticConfig, codec: CodecConfig) -> None:
        super().__init__()
        self.shape = (codec.num_codebooks, codec.num_levels)
        self.num_advances = config.max_advance + 1
        num_scores = codec.num_codebooks * codec.num_levels + self.num_advances
        self.scores = nn.Linear(config.hidden_size, num_scores)

    def forward(self, hidden: Tensor) -> Scores:
        """Split the logits into codes and advance."""
        scores = self.scores(hidden)
        codes = scores[..., : -self.num_advances].unflatten(-1, self.shape)
        return Scores(codes, scores[..., -self.num_advances :])


def windows(padded: Tensor, due: Tensor, config: AcousticConfig) -> Tensor:
    """Symbols around index `due`: [..., W].

    `padded` [..., P] has `num_symbols_before` pads before the first, and at least
    `num_symbols_after` after the last; its leading dims are those of `due` without the last.
    """
    width = config.num_symbols_before + 1 + config.num_symbols_after
    index = due[..., None] + torch.arange(width, device=due.device)
    return padded.gather(-1, index.flatten(-2)).view(index.shape)


def decoder_config(config: VoiceConfig, max_length: int) -> DecoderConfig:
    """The stack's layers as a `DecoderConfig`."""
    acoustic = config.acoustic
    attention = AttentionConfig(
        hidden_size=acoustic.hidden_size,
        num_heads=acoustic.num_heads,
        num_kv_heads=acoustic.num_kv_heads,
        head_dim=acoustic.head_dim,
    )
    return DecoderConfig(
        vocab_size=acoustic.num_symbols + 1,
        hidden_size=acoustic.hidden_size,
        intermediate_size=acoustic.intermediate_size,
        norm_eps=acoustic.norm_eps,
        attention=(attention,) * acoustic.num_layers,
        rope=RopeConfig(
            theta=acoustic.rope_theta,
            num_rotated_dims=acoustic.head_dim,
            max_length=max_length,
            trained_length=max_length,
        ),
    )


class AcousticModel:
    """Generates the codes of a sentence, step by step, and detects when all symbols are spoken.

    Parameters are allocated uninitialized: fill `targets`, then call `prepare` once.
    """

    def __init__(
        self,
        config: VoiceConfig,
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self._device = config, device
        acoustic = config.acoustic
        self.num_codes = config.codec.num_codebooks
        self.start_id = acoustic.num_symbols
        """The last id of every prompt; also the pad around the symbols."""
        self.stack = DecoderStack(decoder_config(config, max_length), dtype=dtype, device=device)
        self.io = nn.ModuleDict(
            {
                "input": AcousticInput(acoustic, config.codec),
                "output": AcousticOutput(acoustic, config.codec),
            }
        ).to(device, dtype)
        self.io.requires_grad_(False)
        self._before = acoustic.num_symbols_before
        widest = self._before + max_length + 1 + acoustic.num_symbols_after
        self._symbols_SP = torch.full((num_slots, widest), self.start_id, device=device)
        self.sample_state: Sequence[Tensor] = ()
        self._num_symbols_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        walk = (num_slots, max_length + 1)
        self._due_SL = torch.zeros(walk, dtype=torch.int64, device=device)
        self._held_SL = torch.zeros_like(self._due_SL)
        self._prompts: dict[int, Sequence[int]] = {}

    def targets(self, encoding: WeightEncoding = AS_STORED) -> Iterator[Target]:
        """Every tensor that the model uses; the layers' are held as `encoding` says."""
        yield from stack_targets(self.stack, "talker.stack", encoding)
        for name, tensor in self.io.state_dict().items():
            yield TensorTarget(f"talker.{name}", tensor)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.stack.prepare(native)
        pack_linears(self.io, native)

    def bind(self, slot: int, prompt_ids: Sequence[int], sampled: Sequence[StepCodes]) -> None:
        """Assign `slot` to a new sentence.

        A sentence that continues in its slot keeps its alignment: a step that is computed again
        reads the alignment at its position, not that of discarded samples.
        """
        if sampled:
            assert prompt_ids == self._prompts[slot], "a sentence stays in its slot"
            return
        self._prompts[slot] = prompt_ids
        symbols = prompt_ids[:-1]
        row_P = torch.full(self._symbols_SP.shape[1:], self.start_id)
        row_P[self._before : self._before + len(symbols)] = torch.tensor(symbols)
        self._symbols_SP[slot] = to_device(row_P, self._device)
        self._num_symbols_S[slot].fill_(len(symbols))
        self._due_SL[slot] = self._held_SL[slot] = 0

    def forward(self, inputs: FrameInputs, kv: KvCache) -> Tensor:
        """`hidden_TC` of prompts and steps."""
        x_TC = self.io["input"](self._positions(inputs))
        return self.stack.run(x_TC, inputs.positions_T, PagedStep(kv, inputs.batch))

    def sample(self, hidden_RC: Tensor, positions_R: Tensor, sampler: FrameSampler) -> FrameSamples:
        """Sample the codes of the step; the alignment's advance is the argmax of its logits."""
        acoustic, slots_R = self.config.acoustic, sampler.slots_B
        due_R = self._due_SL[slots_R, positions_R - 1]
        held_R = self._held_SL[slots_R, positions_R - 1]
        num_symbols_R = self._num_symbols_S.index_select(0, slots_R)
        scores = self.io["output"](hidden_RC)
        codes_RQ = sampler.sample_all(scores.codes)
        advances_RA = scores.advance.float()
        advances_RA[:, 0].masked_fill_(held_R >= acoustic.max_held, -torch.inf)
        advance_R = advances_RA.argmax(-1)
        self._due_SL[slots_R, positions_R] = torch.minimum(due_R + advance_R, num_symbols_R)
        self._held_SL[slots_R, positions_R] = (held_R + 1) * (advance_R == 0)
        return FrameSamples(codes_RQ, due_R >= num_symbols_R, due_R)

    def _positions(self, inputs: FrameInputs) -> AcousticPositions:
        """The inputs of each of the step's positions."""
        codec, slots_T = self.config.codec, inputs.slots_T
        is_start_X = inputs.text_ids_X == self.start_id
        kinds_T = torch.full_like(slots_T, Kind.STEP)
        kinds_T[inputs.text_index_X] = torch.where(is_start_X, Kind.START, Kind.SYMBOL)
        due_T = self._due_SL[slots_T, inputs.positions_T]
        positions_X = inputs.positions_T.index_select(0, inputs.text_index_X)
        due_T[inputs.text_index_X] = positions_X.masked_fill(is_start_X, 0)
        half = (codec.num_levels - 1) / 2
        values_TQ = torch.zeros(len(slots_T), self.num_codes, device=self._device)
        values_TQ[inputs.frame_index_F] = inputs.codes_FQ / half - 1
        padded_TP = self._symbols_SP.index_select(0, slots_T)
        # At its end the alignment points just past the symbols, where there are only pads
        # (`start_id`).
        read_TW = windows(padded_TP, due_T[:, None], self.config.acoustic)[:, 0]
        held_T = self._held_SL[slots_T, inputs.positions_T] * (kinds_T == Kind.STEP)
        return AcousticPositions(read_TW, held_T, values_TQ, kinds_T)

"""The embedded voice's speech-token decoder on the paged cache.

Owns the stack, its two ends, and where in its sentence each slot is at each position. Implements
`engine.frame_head.FrameModel`: a frame is the codes of one step. A prompt is the sentence's symbol
ids with the pads around, and `start_id` after them.

What a position reads includes symbols that come after it, so pages of prompts must not be shared
by their beginnings: run it without prefix caching.

Shapes: X prompt positions, F step positions, R rows, S slots, L positions of a sentence, Q codes,
P padded symbols, C hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from triptych.core.decoders.tensor_names import stack_targets
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import AttentionConfig, KvCache, PagedStep
from triptych.core.layers.decoder import DecoderConfig, DecoderStack
from triptych.core.layers.native_linear import pack_linears
from triptych.core.layers.rotary import RopeConfig
from triptych.core.plan import StepCodes
from triptych.core.sampling.sampler import FrameSampler
from triptych.core.weights.tensors.loading import TensorTarget
from triptych.modalities.tts.configs.voice import VoiceConfig
from triptych.modalities.tts.engine.frame_head import FrameDraws, FrameInputs
from triptych.modalities.tts.engine.models.voice.acoustic import (
    AcousticInput,
    AcousticOutput,
    AcousticPositions,
    Kind,
    windows,
)


def decoder_config(config: VoiceConfig, max_length: int) -> DecoderConfig:
    """The stack's layers in the shared decoder's terms."""
    talker = config.talker
    attention = AttentionConfig(
        hidden_size=talker.hidden_size,
        num_heads=talker.num_heads,
        num_kv_heads=talker.num_kv_heads,
        head_dim=talker.head_dim,
    )
    return DecoderConfig(
        vocab_size=talker.num_symbols + 1,
        hidden_size=talker.hidden_size,
        intermediate_size=talker.intermediate_size,
        norm_eps=talker.norm_eps,
        attention=(attention,) * talker.num_layers,
        rope=RopeConfig(
            theta=talker.rope_theta,
            num_rotated_dims=talker.head_dim,
            max_length=max_length,
            trained_length=max_length,
        ),
    )


class AcousticModel:
    """Says the codes of one step after the other, and itself when all symbols are spoken.

    Parameters are allocated uninitialised: fill `targets`, then call `prepare` once.
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
        talker = config.talker
        self.stack = DecoderStack(decoder_config(config, max_length), dtype=dtype, device=device)
        self.ends = nn.ModuleDict(
            {
                "input": AcousticInput(talker, config.codec),
                "output": AcousticOutput(talker, config.codec),
            }
        ).to(device, dtype)
        self.ends.requires_grad_(False)
        self._before = talker.num_symbols_before
        widest = self._before + max_length + 1 + talker.num_symbols_after
        self._symbols_SP = torch.full((num_slots, widest), self.start_id, device=device)
        self._num_symbols_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        walk = (num_slots, max_length + 1)
        self._due_SL = torch.zeros(walk, dtype=torch.int64, device=device)
        self._held_SL = torch.zeros_like(self._due_SL)
        self._prompts: dict[int, Sequence[int]] = {}

    @property
    def start_id(self) -> int:
        """The last id of every prompt; around the symbols it stands for none."""
        return self.config.talker.num_symbols

    @property
    def num_codes(self) -> int:
        """Codes of a step."""
        return self.config.codec.num_codebooks

    def targets(self) -> Iterator[TensorTarget]:
        """Every tensor of the checkpoint that the talker needs."""
        yield from stack_targets(self.stack, "talker.stack")
        for name, tensor in self.ends.state_dict().items():
            yield TensorTarget(f"talker.{name}", tensor)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.stack.prepare(native)
        pack_linears(self.ends, native)

    def bind(self, slot: int, prompt_ids: Sequence[int], drawn: Sequence[StepCodes]) -> None:
        """A new sentence takes `slot`.

        One that goes on, in the slot it has had all along, finds its walk as it left it: a step
        that is computed again reads what stands at its position, not what was drawn too much.
        """
        if drawn:
            assert prompt_ids == self._prompts[slot], "a walk stays in its slot"
            return
        self._prompts[slot] = prompt_ids
        symbols = prompt_ids[:-1]
        row_P = torch.full(self._symbols_SP.shape[1:], self.start_id)
        row_P[self._before : self._before + len(symbols)] = torch.tensor(symbols)
        if self._device.type == "cuda":
            row_P = row_P.pin_memory()
        self._symbols_SP[slot].copy_(row_P, non_blocking=True)
        self._num_symbols_S[slot] = len(symbols)
        self._due_SL[slot] = self._held_SL[slot] = 0

    def forward(self, inputs: FrameInputs, kv: KvCache) -> Tensor:
        """`hidden_TC` of prompts and steps."""
        x_TC = self.ends["input"](self._positions(inputs))
        return self.stack.run(x_TC, inputs.positions_T, PagedStep(kv, inputs.batch))

    def draw(self, hidden_RC: Tensor, positions_R: Tensor, sampler: FrameSampler) -> FrameDraws:
        """Codes of the step, and the walk's advance, which nothing but the scores decides."""
        talker, slots_R = self.config.talker, sampler.slots_B
        due_R = self._due_SL[slots_R, positions_R - 1]
        held_R = self._held_SL[slots_R, positions_R - 1]
        num_symbols_R = self._num_symbols_S.index_select(0, slots_R)
        scores = self.ends["output"](hidden_RC)
        codes_RQ = sampler.draw_all(scores.codes)
        advances_RA = scores.advance.float()
        advances_RA[:, 0].masked_fill_(held_R >= talker.max_held, -torch.inf)
        advance_R = advances_RA.argmax(-1)
        self._due_SL[slots_R, positions_R] = torch.minimum(due_R + advance_R, num_symbols_R)
        self._held_SL[slots_R, positions_R] = (held_R + 1) * (advance_R == 0)
        return FrameDraws(codes_RQ, due_R >= num_symbols_R)

    def _positions(self, inputs: FrameInputs) -> AcousticPositions:
        """What each of the step's positions reads."""
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
        # The end of a walk points just beyond the symbols, where nothing but `start_id` stands.
        read_TW = windows(padded_TP, due_T[:, None], self.config.talker)[:, 0]
        held_T = self._held_SL[slots_T, inputs.positions_T] * (kinds_T == Kind.STEP)
        return AcousticPositions(read_TW, held_T, values_TQ, kinds_T)

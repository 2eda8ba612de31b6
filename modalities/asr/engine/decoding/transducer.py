"""Transducers: a prediction network over the text so far, joined with one position at a time.

Owns greedy decoding of RNN-T (Graves 2012) and of TDT, which also predicts how many positions a
token spans (Xu et al. 2023). Shape suffixes: B batch (1), T positions, D width, L layers, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.asr.engine.tokens import no_number
from triptych.modalities.asr.engine.window_model import WindowModel
from triptych.modalities.asr.wire import TranscriptToken

_STEPS_PER_STAGE = 32


class TransducerModel(WindowModel):
    """A family with an LSTM and a joint network. `durations` are those of TDT."""

    durations: Sequence[int] = ()

    def transduce(self, encoded_TD: Tensor) -> Generator[Stage, None, tuple[TranscriptToken, ...]]:
        """The tokens of an encoded window, each on the positions that it spans."""
        text = _TextState(self.network.decoder)
        blank_id, max_symbols = self.config.blank_token_id, self.config.max_symbols_per_step
        tokens: list[TranscriptToken] = []
        position = num_here = 0
        text.push(blank_id)
        for step in range(max_symbols * len(encoded_TD)):
            if position >= len(encoded_TD):
                break
            if step % _STEPS_PER_STAGE == 0:
                yield Stage("decode", _STEPS_PER_STAGE)
            token_id, span, logprob = self._choose(encoded_TD[position], text.output_BTD)
            is_blank = token_id == blank_id
            num_here = 0 if is_blank else num_here + 1
            advance = self._advance(is_blank, span, num_here == max_symbols)
            if not is_blank:
                text.push(token_id)
                end = position + (advance if self.durations else 1)
                times = (position * self.position_s, end * self.position_s)
                tokens.append(TranscriptToken(token_id, *times, logprob))
            num_here = 0 if advance else num_here
            position += advance
        return tuple(tokens)

    def _advance(self, is_blank: bool, span: int, is_full: bool) -> int:
        """How many positions to go on; RNN-T stays at one until it has nothing more to say.

        TDT has no limit of tokens at one position, as in transformers (`generation_parakeet`).
        """
        if self.durations:
            return max(span, 1) if is_blank else span
        return int(is_blank or is_full)

    def _choose(self, encoded_D: Tensor, text_BTD: Tensor) -> tuple[int, int, float]:
        """The likeliest token with its span and log-probability. Raises `NonFinite`."""
        joint_V = self.network.joint(text_BTD, encoded_D[None, None])[0, 0].float()
        num_tokens = int(self.config.vocab_size)
        tokens_V, spans_V = joint_V[:num_tokens], joint_V[num_tokens:]
        token_1 = tokens_V.argmax(0, keepdim=True)
        span_1 = spans_V.argmax(0, keepdim=True) if self.durations else torch.zeros_like(token_1)
        logprob_1 = tokens_V.index_select(0, token_1) - tokens_V.logsumexp(0)
        found = HostCopy(torch.cat((token_1.double(), span_1.double(), logprob_1.double()))).get()
        token_id, span_index, value = found.tolist()
        if math.isnan(value):
            raise no_number()
        spanned = self.durations[int(span_index)] if self.durations else 0
        return int(token_id), spanned, value


class _TextState:
    """The prediction network after the tokens so far."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._state_LBD: tuple[Tensor, Tensor] | None = None
        self.output_BTD = torch.empty(0)

    def push(self, token_id: int) -> None:
        """Read one more token."""
        decoder = self._decoder
        ids_BT = to_device(torch.tensor([[token_id]]), decoder.embedding.weight.device)
        hidden_BTD, self._state_LBD = decoder.lstm(decoder.embedding(ids_BT), self._state_LBD)
        self.output_BTD = decoder.decoder_projector(hidden_BTD)

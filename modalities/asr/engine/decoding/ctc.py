"""Connectionist temporal classification: a token or nothing at every position of the encoder.

Owns collapsing the likeliest tokens (Graves et al. 2006): runs of one token count once, blanks not
at all. Shape suffixes: B batch (1), T positions, D width, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator

import torch
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.asr.engine.tokens import no_number
from triptych.modalities.asr.engine.window_model import Heard, Window, WindowModel
from triptych.modalities.asr.wire import TranscriptToken


class CtcModel(WindowModel):
    """A family with an encoder and a head over its positions."""

    @property
    def blank_id(self) -> int:
        """The token of a position without text."""
        return int(self.config.pad_token_id)

    @abstractmethod
    def logits(self, window: Window) -> Generator[Stage, None, Tensor]:
        """The logits [T, V] of all valid positions."""

    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        """Recognize a window."""
        logits_TV = yield from self.logits(window)
        yield Stage("decode", len(logits_TV))
        best_T2 = torch.stack(_likeliest(logits_TV.float()), 1)
        return Heard(self._collapsed(HostCopy(best_T2).get().tolist()))

    def _collapsed(self, best: list[list[float]]) -> tuple[TranscriptToken, ...]:
        tokens: list[TranscriptToken] = []
        step_s, before = self.position_s, self.blank_id
        for position, (token, logprob) in enumerate(best):
            if math.isnan(logprob):
                raise no_number()
            token_id, end_s = int(token), (position + 1) * step_s
            if token_id == before != self.blank_id:
                last = tokens[-1]
                tokens[-1] = TranscriptToken(token_id, last.start_s, end_s, last.logprob)
            elif token_id != self.blank_id:
                tokens.append(TranscriptToken(token_id, position * step_s, end_s, logprob))
            before = token_id
        return tuple(tokens)


def _likeliest(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each position with its log-probability."""
    best_T = logits_TV.argmax(-1)
    logprob_T = logits_TV.gather(1, best_T[:, None])[:, 0] - logits_TV.logsumexp(-1)
    return best_T.double(), logprob_T.double()

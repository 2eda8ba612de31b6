"""Which tokens Whisper may say next.

Owns the masks and the grammar of timestamps, after OpenAI's `decoding.py` (`ApplyTimestampRules`):
a window begins with a time, times come in pairs around text and never run backwards, and a time is
said where all times together are likelier than any one token of text. Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.modalities.recognition.spec import WhisperSpec


class TokenRules:
    """The grammar of one model, with its masks on the device."""

    def __init__(self, spec: WhisperSpec, device: torch.device) -> None:
        self._spec = spec
        never = (*spec.suppressed_ids, spec.no_timestamps_id)
        self._never = torch.tensor(never, device=device)
        self._never_first = torch.tensor(spec.suppressed_first_ids, dtype=torch.long, device=device)

    def apply(self, logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
        """`logits_V` (float32, changed in place) without what may not follow `token_ids`."""
        logits_V[self._never] = -torch.inf
        if token_ids:
            self._continue(logits_V, token_ids)
        else:
            self._begin(logits_V)
        first = self._spec.first_timestamp_id
        is_time = logits_V[first:].logsumexp(0) > logits_V[:first].max()
        # Not an `if`: the answer would have to come from the device first.
        logits_V[:first].masked_fill_(is_time, -torch.inf)
        return logits_V

    def _begin(self, logits_V: Tensor) -> None:
        first = self._spec.first_timestamp_id
        logits_V[self._never_first] = -torch.inf
        logits_V[:first] = -torch.inf
        if self._spec.max_first_timestamp is not None:
            logits_V[first + self._spec.max_first_timestamp + 1 :] = -torch.inf

    def _continue(self, logits_V: Tensor, token_ids: Sequence[int]) -> None:
        spec = self._spec
        first = spec.first_timestamp_id
        is_after_time = spec.is_timestamp(token_ids[-1])
        is_second = is_after_time and (len(token_ids) < 2 or spec.is_timestamp(token_ids[-2]))
        times = [token_id for token_id in token_ids if spec.is_timestamp(token_id)]
        if is_second:  # a pair is complete, or the window's first time is: text must follow
            logits_V[first:] = -torch.inf
        elif is_after_time:  # half a pair: the other half, or the end
            logits_V[: spec.end_id] = -torch.inf
        if times:
            earliest = times[-1] if is_after_time and not is_second else times[-1] + 1
            logits_V[first:earliest] = -torch.inf

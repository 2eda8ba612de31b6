"""The interface of a causal language model, and the memory of its logits.

Owns the protocol. Knows neither layers nor sampling.

Shapes: T tokens, C hidden, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.sampling.sampler import LOGIT_BYTES

PROMPT_LOGITS_ROWS = 128
"""Positions scored at once for prompt log-probabilities."""

_SCORED_LOGIT_BYTES = 12  # the model's, its copy in float32, and its log-probability


def logits_bytes(num_rows: int, vocab_size: int) -> int:
    """Peak bytes of logits for sampling `num_rows` rows, or for scoring their prompts."""
    if not num_rows:
        return 0
    scoring = PROMPT_LOGITS_ROWS * _SCORED_LOGIT_BYTES
    return vocab_size * max(num_rows * LOGIT_BYTES, scoring)


@runtime_checkable
class CausalModel(Protocol):
    """A language model as the text head uses it, such as `runtime.layers.decoder.Decoder`."""

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        ...

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute `hidden_TC`, the last hidden states."""
        ...

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Compute `logits_RV`, the scores of the vocabulary."""
        ...

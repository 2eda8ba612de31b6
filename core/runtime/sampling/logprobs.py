"""Log-probabilities of chosen tokens and of the likeliest alternatives.

Log-probabilities are natural logarithms of the model's own distribution: the plain log-softmax of
its logits, before bias, penalties, temperature and filters. That is what OpenAI reports, and the
only choice under which sampled and prompt tokens can be compared.

Shapes: T positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.core.engine_api.tokens import TokenLogprob
from triptych.core.runtime.sampling.host_copy import HostCopy


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities on their way to the host: T chosen tokens with K alternatives each."""

    ids_TK1: HostCopy
    values_TK1: HostCopy

    @classmethod
    def of(cls, logits_TV: torch.Tensor, token_ids_T: torch.Tensor, num_top: int) -> Logprobs:
        """Look up the tokens, and the `num_top` likeliest ones (no more than the vocabulary)."""
        logits_TV, ids_TK1 = logits_TV.float(), token_ids_T[:, None]
        if num_top:
            top = logits_TV.topk(min(num_top, logits_TV.shape[-1]), dim=-1)
            ids_TK1 = torch.cat((ids_TK1, top.indices), -1)
        # Not `logsumexp`: a single position would be summed by several threads there, in parts.
        values_TK1 = logits_TV.log_softmax(-1).gather(-1, ids_TK1)
        return cls(HostCopy(ids_TK1), HostCopy(values_TK1))

    def to_entries(self, num_top: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """The host's view, with `num_top` alternatives per position, likeliest first."""
        rows = zip(
            self.ids_TK1.get().tolist(), self.values_TK1.get().tolist(), num_top, strict=True
        )
        return tuple(_entry(ids, values, count) for ids, values, count in rows)


def _entry(ids: list[int], values: list[float], num_top: int) -> TokenLogprob:
    # Equal probabilities are ordered by id: topk leaves their order open.
    ranked = sorted(zip(ids[1:], values[1:], strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(ids[0], values[0], tuple(ranked[:num_top]))

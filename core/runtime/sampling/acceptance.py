"""Lossy rules by which drafts count although another token was sampled.

Owns two rules, both off by default. *Relaxed*, while a model reasons: the draft is among the
likeliest tokens, and its probability, without temperature, near that of the likeliest (as MAX's
`--use-relaxed-acceptance-for-thinking`). *Thresholds*, for rows that are sampled at random: the
draft's probability `p` is at least `single`, or it is accepted with the probability `p / acc` (as
SGLang's `--speculative-accept-threshold-single` and `-acc`). With thresholds of 1 nothing is lost:
the exact rule accepts a draft with the probability `p`. Knows no slots.

Shapes: R rows with a draft, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from triptych.core.options.speculation import NGRAM, RESIDUAL, SpeculationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyRules:
    """How near a draft has to be to what the model would sample."""

    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    single: float = 1.0
    acc: float = 1.0

    @classmethod
    def of(cls, options: SpeculationOptions) -> Self | None:
        """The rules that options set, if any."""
        strategy, algorithm = options.rejection_sampling_strategy, options.speculative_algorithm
        assert strategy != RESIDUAL or algorithm in ("none", NGRAM), "checked with the options"
        rules = cls(
            relaxed_topk=options.relaxed_topk,
            relaxed_delta=options.relaxed_delta,
            single=options.speculative_accept_threshold_single,
            acc=options.speculative_accept_threshold_acc,
        )
        is_used = options.use_relaxed_acceptance_for_thinking or rules.has_thresholds
        return rules if is_used else None

    @property
    def has_thresholds(self) -> bool:
        """Whether drafts of all rows may count that were not sampled."""
        return min(self.single, self.acc) < 1

    def are_near(self, logits_RV: torch.Tensor, drafts_R: torch.Tensor) -> torch.Tensor:
        """Whether each draft is near the likeliest token of its row."""
        probs_RV = torch.softmax(logits_RV.float(), -1)
        own_R1 = probs_RV.gather(-1, drafts_R[:, None])
        num_above_R = (probs_RV > own_R1).sum(-1)
        is_close_R = own_R1[:, 0] >= probs_RV.amax(-1) - self.relaxed_delta
        return is_close_R & (num_above_R < self.relaxed_topk)

    def pass_thresholds(
        self, probs_RV: torch.Tensor, drafts_R: torch.Tensor, uniform_R: torch.Tensor
    ) -> torch.Tensor:
        """Whether drafts count that were not sampled.

        `probs_RV` need not add up to 1; `uniform_R` are numbers that no sample used. Drafts that
        were sampled, with the probability `p`, count anyway; these make up what lacks to `p / acc`.
        """
        own_R = probs_RV.gather(-1, drafts_R[:, None])[:, 0] / probs_RV.sum(-1)
        wanted_R = (own_R / max(self.acc, 1e-9)).clamp(max=1.0)
        missing_R = (wanted_R - own_R) / (1 - own_R).clamp(min=1e-12)
        return (own_R >= self.single) | (uniform_R < missing_R)

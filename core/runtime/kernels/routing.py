"""Chooses the experts of each token, and their weights.

Owns the rules of routing and their torch reference, of which
`core.runtime.kernels.triton.routing` and core/runtime/kernels/native/mixture.c are kernels. Knows
no experts.

Shapes: T tokens, E experts, G groups of experts, C chosen experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid")
LEAST_TOTAL = 1e-20
"""Added to the sum of a token's weights before they are divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The choice of `num_chosen` experts by their scores, and their weights.

    If it `renormalizes`, weights add up to `scale`; otherwise they are scores times `scale`.
    Experts lie in `num_groups` groups of equal size, and only those of `num_chosen_groups` can be
    chosen: those where the sum of the best `num_group_scores` scores is highest (DeepSeek-AI 2024,
    arXiv:2405.04434 and arXiv:2412.19437).
    """

    num_chosen: int
    scoring: Scoring = "softmax"
    renormalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 2

    @property
    def is_limited(self) -> bool:
        """Whether some groups are left out."""
        return self.num_chosen_groups < self.num_groups


def route(
    logits_TE: torch.Tensor, routing: Routing, correction_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (float32) and numbers (int32) of the experts of each token, `[T, C]`.

    The best scores are chosen, the lower number of equals first. `correction_E` in float32 is
    added to the scores for the choice, not for the weight (Wang et al. 2024, arXiv:2408.15664).
    """
    if logits_TE.is_cuda:
        from triptych.core.runtime.kernels.triton.routing import route_by

        weights_TC, experts_TC = route_by(logits_TE, routing, correction_E)
        return weights_TC, experts_TC
    return reference(logits_TE, routing, correction_E)


def reference(
    logits_TE: torch.Tensor, routing: Routing, correction_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as above in torch, in float32."""
    logits = logits_TE.float()
    scores_TE = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if routing.is_limited:
        ranked_TE = _in_best_groups(ranked_TE, routing)
    experts_TC = _best(ranked_TE, routing.num_chosen)
    weights_TC = scores_TE.gather(1, experts_TC)
    if routing.renormalizes:
        weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + LEAST_TOTAL)
    return weights_TC * routing.scale, experts_TC.to(torch.int32)


def _in_best_groups(ranked_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The scores, with minus infinity for experts outside of a token's chosen groups."""
    grouped = ranked_TE.unflatten(1, (routing.num_groups, -1))
    scores_TG = grouped.topk(routing.num_group_scores, dim=-1).values.sum(dim=-1)
    is_left_out_TG = torch.ones_like(scores_TG, dtype=torch.bool)
    is_left_out_TG.scatter_(1, _best(scores_TG, routing.num_chosen_groups), value=False)
    limited_TE: torch.Tensor = grouped.masked_fill(is_left_out_TG[..., None], -torch.inf).flatten(1)
    return limited_TE


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]

"""Chooses the experts of each token, and their weights.

Owns top-k routing and its torch reference, of which `core.runtime.kernels.triton.routing` is one
kernel. Knows no experts.

Shapes: T tokens, E experts, C chosen experts of a token.
"""

from __future__ import annotations

import torch


def route(
    logits_TE: torch.Tensor,
    num_chosen: int,
    *,
    scoring: str = "softmax",
    bias_E: torch.Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (float32) and numbers (int32) of the experts of each token, `[T, C]`.

    The `num_chosen` best scores are chosen, the lower number of equals first; `bias_E` in float32
    corrects the choice, not the weight (arXiv:2408.15664). With `renormalize` weights add up to
    `scale`; otherwise they are the scores times `scale`.
    """
    if logits_TE.is_cuda:
        from triptych.core.runtime.kernels.triton.routing import route as on_gpu

        weights_TC, experts_TC = on_gpu(logits_TE, num_chosen, scoring, bias_E, renormalize, scale)
        return weights_TC, experts_TC
    return reference(logits_TE, num_chosen, scoring, bias_E, renormalize, scale)


def reference(
    logits_TE: torch.Tensor,
    num_chosen: int,
    scoring: str,
    bias_E: torch.Tensor | None,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as above in torch, in float32."""
    logits = logits_TE.float()
    scores_TE = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    experts_TC = ranked_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights_TC = scores_TE.gather(1, experts_TC)
    if renormalize:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    return weights_TC * scale, experts_TC.to(torch.int32)

"""Chooses each token's experts: `runtime.kernels.routing` in one pass over a token's logits.

Owns the kernel. Knows no experts.

Shapes: T tokens, E experts, C chosen experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    are_on_one_device,
    product_variant,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_SCORINGS = ("softmax", "sigmoid")


def launch_route(
    logits_TE: torch.Tensor,
    num_chosen: int,
    scoring: str,
    bias_E: torch.Tensor | None,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the experts of each token, as `runtime.kernels.routing.route`."""
    num_tokens, num_experts = logits_TE.shape
    _check(logits_TE, num_chosen, scoring, bias_E)
    weights_TC, experts_TC = _empty(logits_TE, num_chosen)
    _route_kernel[num_tokens,](
        logits_TE,
        bias_E,
        weights_TC,
        experts_TC,
        num_experts,
        scale,
        SCORING=scoring,
        RENORMALIZE=renormalize,
        NUM_CHOSEN=num_chosen,
        C=triton.next_power_of_2(num_chosen),
        E=triton.next_power_of_2(num_experts),
        num_warps=1,
        num_stages=NUM_STAGES,
    )
    return weights_TC, experts_TC


route = define_operator("route", launch_route)


@fake_of(route)
def _(
    logits_TE: torch.Tensor,
    num_chosen: int,
    scoring: str,
    bias_E: torch.Tensor | None,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(logits_TE, num_chosen, scoring, bias_E)
    return _empty(logits_TE, num_chosen)


def _check(
    logits_TE: torch.Tensor, num_chosen: int, scoring: str, bias_E: torch.Tensor | None
) -> None:
    assert are_on_one_device(logits_TE, bias_E)
    assert scoring in _SCORINGS
    assert num_chosen <= logits_TE.shape[1]
    assert logits_TE.is_contiguous()
    assert bias_E is None or (bias_E.is_contiguous() and bias_E.dtype == torch.float32)


def _empty(logits_TE: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits_TE.shape[0], num_chosen
    return (
        logits_TE.new_empty(shape, dtype=torch.float32),
        logits_TE.new_empty(shape, dtype=torch.int32),
    )


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    num_experts,
    scale,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts_E = tl.arange(0, E)
    is_expert_E = experts_E < num_experts
    logits_E = tl.load(
        logits_ptr + token * num_experts + experts_E, mask=is_expert_E, other=float("-inf")
    ).to(tl.float32)
    if SCORING == "softmax":
        scores_E = tl.exp(logits_E - tl.max(logits_E, 0))
        scores_E /= tl.sum(scores_E, 0)
    else:
        scores_E = tl.sigmoid(logits_E)
    ranked_E = scores_E
    if bias_ptr is not None:
        ranked_E += tl.load(bias_ptr + experts_E, mask=is_expert_E, other=0)
    # A row of NaN takes the first experts, so that only its own weights are NaN.
    ranked_E = tl.where(ranked_E != ranked_E, -3e38, ranked_E)  # noqa: PLR0124
    ranked_E = tl.where(is_expert_E, ranked_E, float("-inf"))
    slots_C = tl.arange(0, C)
    weights_C = tl.zeros((C,), tl.float32)
    chosen_C = tl.zeros((C,), tl.int32)
    for slot in range(NUM_CHOSEN):
        expert = tl.argmax(ranked_E, 0)
        weight = tl.sum(tl.where(experts_E == expert, scores_E, 0.0), 0)
        ranked_E = tl.where(experts_E == expert, float("-inf"), ranked_E)
        weights_C = tl.where(slots_C == slot, weight, weights_C)
        chosen_C = tl.where(slots_C == slot, expert, chosen_C)
    if RENORMALIZE:
        weights_C /= tl.sum(weights_C, 0)
    places_C = token * NUM_CHOSEN + slots_C
    tl.store(weights_ptr + places_C, weights_C * scale, mask=slots_C < NUM_CHOSEN)
    tl.store(experts_ptr + places_C, chosen_C, mask=slots_C < NUM_CHOSEN)


def variants() -> tuple[Variant, ...]:
    """Experts: 8 among 128 by softmax, and 8 among 256 by corrected sigmoid."""
    return (
        _variant("softmax", 128, None),
        _variant("sigmoid", 256, "*fp32"),
    )


def _variant(scoring: str, num_experts: int, bias: str | None) -> Variant:
    types = {"logits_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i32", "scale": "fp32"}
    constants = {
        "SCORING": scoring,
        "RENORMALIZE": True,
        "NUM_CHOSEN": 8,
        "C": 8,
        "E": num_experts,
    }
    if bias is None:
        constants["bias_ptr"] = None
    else:
        types["bias_ptr"] = bias
    return product_variant(scoring, _route_kernel, types, constants, num_warps=1)

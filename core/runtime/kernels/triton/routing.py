"""Chooses each token's experts: `runtime.kernels.routing` in one pass over a token's logits.

Owns the kernel. Knows no experts.

Shapes: T tokens, E experts, C chosen experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.routing import LEAST_TOTAL, SCORINGS, Routing
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    are_on_one_device,
    product_variant,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_LEAST_TOTAL = tl.constexpr(LEAST_TOTAL)


def route_by(
    logits_TE: torch.Tensor, routing: Routing, correction_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the experts of each token, as `runtime.kernels.routing.route`."""
    weights_TC, experts_TC = route(logits_TE, correction_E, *route_arguments(routing))
    return weights_TC, experts_TC


def route_arguments(routing: Routing) -> tuple[int, str, bool, float, list[int]]:
    """The rules as arguments of the operator."""
    groups = [routing.num_groups, routing.num_chosen_groups, routing.num_group_scores]
    chosen, is_normed = routing.num_chosen, routing.renormalizes
    return chosen, routing.scoring, is_normed, routing.scale, groups if routing.is_limited else []


def launch_route(
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    num_chosen: int,
    scoring: str,
    renormalizes: bool,
    scale: float,
    groups: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by the fields of a `Routing`.

    `groups` are the numbers of groups, of chosen groups and of scores that rank a group; or none.
    """
    num_tokens, num_experts = logits_TE.shape
    _check(logits_TE, correction_E, num_chosen, scoring, groups)
    weights_TC, experts_TC = _empty(logits_TE, num_chosen)
    num_groups, num_chosen_groups, num_group_scores = groups or (1, 1, 1)
    _route_kernel[num_tokens,](
        logits_TE,
        correction_E,
        weights_TC,
        experts_TC,
        num_experts,
        scale,
        SCORING=scoring,
        RENORMALIZE=renormalizes,
        NUM_CHOSEN=num_chosen,
        NUM_GROUPS=num_groups,
        NUM_CHOSEN_GROUPS=num_chosen_groups,
        NUM_GROUP_SCORES=num_group_scores,
        C=triton.next_power_of_2(num_chosen),
        E=triton.next_power_of_2(num_experts),
        G=triton.next_power_of_2(num_groups),
        num_warps=1,
        num_stages=NUM_STAGES,
    )
    return weights_TC, experts_TC


route = define_operator("route", launch_route)


@fake_of(route)
def _(
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    num_chosen: int,
    scoring: str,
    renormalizes: bool,
    scale: float,
    groups: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(logits_TE, correction_E, num_chosen, scoring, groups)
    return _empty(logits_TE, num_chosen)


def _check(
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    num_chosen: int,
    scoring: str,
    groups: list[int],
) -> None:
    assert are_on_one_device(logits_TE, correction_E)
    assert scoring in SCORINGS
    assert num_chosen <= logits_TE.shape[1]
    assert logits_TE.is_contiguous()
    assert correction_E is None or correction_E.is_contiguous()
    assert correction_E is None or correction_E.dtype == torch.float32
    assert not groups or logits_TE.shape[1] % groups[0] == 0


def _empty(logits_TE: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits_TE.shape[0], num_chosen
    return (
        logits_TE.new_empty(shape, dtype=torch.float32),
        logits_TE.new_empty(shape, dtype=torch.int32),
    )


@triton.jit
def _route_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    experts_ptr,
    num_experts,
    scale,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_GROUP_SCORES: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
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
    if correction_ptr is not None:
        ranked_E += tl.load(correction_ptr + experts_E, mask=is_expert_E, other=0)
    # A row of NaN takes the first experts, so that only its own weights are NaN.
    ranked_E = tl.where(ranked_E != ranked_E, -3e38, ranked_E)  # noqa: PLR0124
    ranked_E = tl.where(is_expert_E, ranked_E, float("-inf"))
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        groups_E = experts_E // (num_experts // NUM_GROUPS)
        ranked_E = _in_best_groups(
            ranked_E, groups_E, NUM_GROUPS, NUM_CHOSEN_GROUPS, NUM_GROUP_SCORES, G
        )
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
        weights_C /= tl.sum(weights_C, 0) + _LEAST_TOTAL
    places_C = token * NUM_CHOSEN + slots_C
    tl.store(weights_ptr + places_C, weights_C * scale, mask=slots_C < NUM_CHOSEN)
    tl.store(experts_ptr + places_C, chosen_C, mask=slots_C < NUM_CHOSEN)


@triton.jit
def _in_best_groups(
    ranked_E,
    groups_E,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_GROUP_SCORES: tl.constexpr,
    G: tl.constexpr,
):
    """The scores, with minus infinity for experts outside of the chosen groups."""
    experts_E = tl.arange(0, ranked_E.shape[0])
    groups_G = tl.arange(0, G)
    scores_G = tl.where(groups_G < NUM_GROUPS, 0.0, float("-inf"))
    for group in range(NUM_GROUPS):
        own_E = tl.where(groups_E == group, ranked_E, float("-inf"))
        for _ in range(NUM_GROUP_SCORES):
            best = tl.argmax(own_E, 0)
            score = tl.max(own_E, 0)
            own_E = tl.where(experts_E == best, float("-inf"), own_E)
            scores_G += tl.where(groups_G == group, score, 0.0)
    is_chosen_E = groups_E < 0
    for _ in range(NUM_CHOSEN_GROUPS):
        best = tl.argmax(scores_G, 0)
        is_chosen_E |= groups_E == best
        scores_G = tl.where(groups_G == best, float("-inf"), scores_G)
    return tl.where(is_chosen_E, ranked_E, float("-inf"))


def variants() -> tuple[Variant, ...]:
    """Experts: 8 among 128 by softmax, and among 256 in groups by corrected sigmoid."""
    return (
        _variant("softmax", 128, 1, None),
        _variant("sigmoid", 256, 8, "*fp32"),
    )


def _variant(scoring: str, num_experts: int, num_groups: int, correction: str | None) -> Variant:
    types = {"logits_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i32", "scale": "fp32"}
    constants = {
        "SCORING": scoring,
        "RENORMALIZE": True,
        "NUM_CHOSEN": 8,
        "NUM_GROUPS": num_groups,
        "NUM_CHOSEN_GROUPS": min(num_groups, 4),
        "NUM_GROUP_SCORES": min(num_groups, 2),
        "C": 8,
        "E": num_experts,
        "G": num_groups,
    }
    if correction is None:
        constants["correction_ptr"] = None
    else:
        types["correction_ptr"] = correction
    return product_variant(scoring, _route_kernel, types, constants, num_warps=1)

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.routing import Routing, Scoring, reference
from triptych.core.runtime.kernels.triton import routing

pytestmark = pytest.mark.gpu
launch = on_device(routing.launch_route)
LIMITED = {"num_groups": 4, "num_chosen_groups": 2}
RULES: tuple[tuple[int, int, dict[str, int]], ...] = (
    (8, 2, {}),
    (60, 5, {}),
    (3, 3, {}),
    (60, 5, LIMITED),
    (16, 3, LIMITED | {"num_group_scores": 1}),
)


def launch_route(
    logits_TE: torch.Tensor, rules: Routing, correction_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TC, experts_TC = launch(logits_TE, correction_E, *routing.route_arguments(rules))
    return weights_TC, experts_TC


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_corrected", [True, False])
@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen", "groups"), RULES)
def test_chooses_and_weighs_as_the_reference_does(
    scoring: Scoring,
    is_corrected: bool,
    renormalizes: bool,
    num_experts: int,
    num_chosen: int,
    groups: dict[str, int],
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits_TE = torch.randn(5, num_experts, generator=generator)
    correction_E = torch.randn(num_experts, generator=generator) if is_corrected else None
    rules = Routing(
        num_chosen=num_chosen, scoring=scoring, renormalizes=renormalizes, scale=2.5, **groups
    )
    weights_TC, experts_TC = launch_route(logits_TE, rules, correction_E)
    expected_weights_TC, expected_experts_TC = reference(logits_TE, rules, correction_E)
    assert torch.equal(experts_TC, expected_experts_TC)
    torch.testing.assert_close(weights_TC, expected_weights_TC)


def test_of_equals_the_first_is_chosen() -> None:
    limited = Routing(num_chosen=3, num_groups=3, num_chosen_groups=2)
    for rules in (Routing(num_chosen=3), limited):
        _, experts_TC = launch_route(torch.zeros(2, 9), rules)
        assert experts_TC.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nan_fails_alone_with_experts_that_exist() -> None:
    rules = Routing(num_chosen=2)
    logits_TE = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    expected_TC = launch_route(logits_TE, rules)[0]
    logits_TE[1] = float("nan")
    weights_TC, experts_TC = launch_route(logits_TE, rules)
    assert weights_TC[1].isnan().all()
    assert sorted(experts_TC[1].tolist()) == [0, 1]
    assert torch.equal(weights_TC[[0, 2]], expected_TC[[0, 2]])

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.routing import reference
from triptych.core.runtime.kernels.triton import routing

pytestmark = pytest.mark.gpu
launch_route = on_device(routing.launch_route)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (60, 5), (3, 3)])
def test_chooses_and_weighs_as_the_reference_does(
    scoring: str, has_bias: bool, renormalize: bool, num_experts: int, num_chosen: int
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits_TE = torch.randn(5, num_experts, generator=generator)
    bias_E = torch.randn(num_experts, generator=generator) if has_bias else None
    arguments = logits_TE, num_chosen, scoring, bias_E, renormalize, 2.5
    weights_TC, experts_TC = launch_route(*arguments)
    expected_weights_TC, expected_experts_TC = reference(*arguments)
    assert torch.equal(experts_TC, expected_experts_TC)
    torch.testing.assert_close(weights_TC, expected_weights_TC)


def test_of_equals_the_first_is_chosen() -> None:
    _, experts_TC = launch_route(torch.zeros(2, 7), 3, "softmax", None, True, 1.0)
    assert experts_TC.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nan_fails_alone_with_experts_that_exist() -> None:
    logits_TE = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    expected_TC = launch_route(logits_TE, 2, "softmax", None, True, 1.0)[0]
    logits_TE[1] = float("nan")
    weights_TC, experts_TC = launch_route(logits_TE, 2, "softmax", None, True, 1.0)
    assert weights_TC[1].isnan().all()
    assert sorted(experts_TC[1].tolist()) == [0, 1]
    assert torch.equal(weights_TC[[0, 2]], expected_TC[[0, 2]])

"""Convolution of streams against torch's over past and new steps joined."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import conv1d, pad

from support.kernel_device import each_type, on_device
from triptych.core.runtime.kernels.triton import stream_conv
from triptych.core.runtime.kernels.triton.stream_conv import is_supported

pytestmark = pytest.mark.gpu
launch = on_device(stream_conv.launch)


@dataclass(frozen=True)
class Case:
    """A layer and a push; `groups` is 1 or the number of channels."""

    channels: int = 5
    outputs: int = 7
    width: int = 3
    stride: int = 1
    dilation: int = 1
    num_kept: int = 2
    num_new: int = 4
    groups: int = 1
    dtype: torch.dtype = torch.float32


CASES = [
    Case(),
    Case(width=7, dilation=3, num_kept=18, num_new=1),
    Case(channels=40, outputs=70, num_new=13),
    Case(width=4, stride=2, num_kept=3, num_new=6),
    Case(num_kept=5, num_new=3, width=2),
    Case(channels=18, outputs=18, groups=18, width=7, num_kept=6, num_new=70),
    Case(channels=3, outputs=3, groups=3, dilation=2, num_kept=4, num_new=2),
    Case(channels=1, outputs=4, width=5, num_kept=4),
    Case(channels=16, outputs=8, dtype=torch.float16),
]
IN_TYPES = [replace(case, dtype=dtype) for case in CASES[:-1] for dtype in each_type()]
"""The interpreter multiplies matrices of bfloat16 as integers."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("case", [*IN_TYPES, CASES[-1]])
def test_equals_torch(case: Case, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    slots = torch.tensor([3, 0])
    state, x = random(5, case.channels, case.num_kept), random(2, case.channels, case.num_new)
    weight = random(case.outputs, case.channels // case.groups, case.width)
    bias = random(case.outputs) if has_bias else None
    num_outputs = case.num_new // case.stride
    buffer = torch.cat((state[slots], x), -1)
    num_needed = (num_outputs - 1) * case.stride + (case.width - 1) * case.dilation + 1
    window = pad(buffer, (0, max(0, num_needed - buffer.shape[-1])))[..., :num_needed]
    layout = (case.stride, 0, case.dilation, case.groups)
    expected = conv1d(window.float(), weight.float(), None, *layout)
    expected += 0 if bias is None else bias.float()[:, None]
    kept = state.clone()
    kept[slots] = buffer[..., case.num_new :]
    assert is_supported(weight, case.groups, case.num_kept)
    found = launch(x, state, slots, None, weight, bias, case.stride, case.dilation, num_outputs)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(state, kept)


def test_rows_with_fewer_steps_keep_their_own_past() -> None:
    state, x, weight = torch.randn(2, 3, 4), torch.randn(2, 3, 6), torch.randn(3, 3, 5)
    before, slots = state.clone(), torch.tensor([1, 0])
    launch(x, state, slots, torch.tensor([2, 5]), weight, None, 1, 1, 6)
    for row, num_new in enumerate((2, 5)):
        buffer = torch.cat((before[slots[row]], x[row]), -1)
        assert torch.equal(state[slots[row]], buffer[:, num_new : num_new + 4])


def test_pushes_make_the_whole() -> None:
    x, weight = torch.randn(1, 6, 20), torch.randn(4, 6, 3)
    state, slots = torch.zeros(1, 6, 4), torch.tensor([0])
    parts = [
        launch(part.contiguous(), state, slots, None, weight, None, 1, 2, part.shape[-1])
        for part in x.split((1, 7, 3, 9), -1)
    ]
    torch.testing.assert_close(torch.cat(parts, -1), conv1d(pad(x, (4, 0)), weight, dilation=2))


def test_groups_between_are_left_to_torch() -> None:
    assert not is_supported(torch.zeros(8, 4, 3), 2, 2)
    assert not is_supported(torch.zeros(8, 8, 1), 1, 0)

"""The order of attention kernels: of a GPU's, the first for as long as it is asked for."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from triptych.core.runtime.layers.attention_order import (
    CUDNN_FIRST,
    TORCHS_OWN,
    attention_order,
)

GPU = torch.device("cuda")


def current() -> list[SDPBackend]:
    return list(_cur_sdpa_kernel_backends(with_priority=True))


def test_cudnn_is_first_and_the_rest_stay_allowed() -> None:
    before = current()
    with attention_order(GPU, CUDNN_FIRST):
        inside = current()
    assert inside[0] is SDPBackend.CUDNN_ATTENTION
    assert set(inside) >= set(before) - {SDPBackend.OVERRIDEABLE}
    assert current() == before


def test_a_cpu_and_torchs_own_order_change_nothing() -> None:
    before = current()
    with attention_order(torch.device("cpu"), CUDNN_FIRST):
        assert current() == before
    with attention_order(GPU, TORCHS_OWN):
        assert current() == before

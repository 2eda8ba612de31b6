"""The order of attention kernels: on a GPU cuDNN's is first, for as long as it is asked for."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from triptych.core.runtime.layers.attention_order import fastest_attention


def order() -> list[SDPBackend]:
    return list(_cur_sdpa_kernel_backends(with_priority=True))


def test_cudnn_is_first_on_a_gpu_and_the_rest_stay_allowed() -> None:
    before = order()
    with fastest_attention(torch.device("cuda")):
        inside = order()
    assert inside[0] is SDPBackend.CUDNN_ATTENTION
    assert set(inside) >= set(before) - {SDPBackend.OVERRIDEABLE}
    assert order() == before


def test_a_cpu_keeps_its_order() -> None:
    before = order()
    with fastest_attention(torch.device("cpu")):
        assert order() == before

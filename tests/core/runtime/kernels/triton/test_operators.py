"""Tensors that say they are on a GPU go through the operators: shapes and types as on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from triptych.core.runtime.kernels import adaln, gated
from triptych.core.runtime.kernels.altup import Router, correct_streams, predict_streams
from triptych.core.runtime.kernels.gelu_rows import quantize_gelu_rows
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.norm_rotary import norm_rotary
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, write_pages
from triptych.core.runtime.kernels.rms_norm import add_rms_norm, rms_norm
from triptych.core.runtime.kernels.rope_write import HeadNorm, HeadRules, Rotation, rope_write
from triptych.core.runtime.kernels.row_moments import as_large_as, relu_above
from triptych.core.runtime.kernels.triton.sampling import sample_rows
from triptych.core.runtime.kernels.triton.stream_conv import stream_conv
from triptych.core.runtime.sampling.rows import GroupedRows
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.modalities.diffusion.engine.tensor_pool import TensorPool

Made = Callable[[torch.device], object]


def batch_on(device: torch.device) -> AttentionBatch:
    return AttentionBatch(
        page_table_BM=torch.zeros(2, 1, dtype=torch.int64, device=device),
        context_lengths_B=torch.ones(2, dtype=torch.int64, device=device),
        query_starts_B=torch.arange(2, device=device),
        write_slots_T=torch.arange(2, device=device),
        num_decode_rows=2,
        host_query_lengths_B=np.ones(2, np.int64),
        host_context_lengths_B=np.ones(2, np.int64),
    )


def written(device: torch.device) -> object:
    qkv = torch.rand(2, 8, 16, device=device, dtype=torch.bfloat16)
    pages = KvPages.empty((3, 4, 2, 16), torch.int8, device)
    norm = HeadNorm(torch.rand(6, 16, device=device), 1e-6)
    rows = torch.rand(2, 1, 16, device=device, dtype=torch.bfloat16)
    write_pages(qkv[:, 4:6], qkv[:, 6:], pages, batch_on(device))
    rope_write(qkv, HeadRules(), None, pages, batch_on(device))
    return rope_write(qkv, HeadRules(norm), Rotation(rows, rows), pages, batch_on(device))


def normed(device: torch.device) -> object:
    x = torch.rand(3, 64, device=device, dtype=torch.bfloat16)
    weight = torch.rand(64, device=device)
    return rms_norm(x, weight, 1e-5), add_rms_norm(x, x, weight, 1e-5)


def modulated(device: torch.device) -> object:
    x, row = torch.rand(2, 3, 16, device=device), torch.rand(2, 16, device=device)
    return (
        adaln.modulated_norm(x, row, row, eps=1e-6),
        adaln.gated_modulated_norm(x, (x, row), row, row, eps=1e-6),
    )


def gates(device: torch.device) -> object:
    x = torch.rand(3, 20, device=device, dtype=torch.float16)
    return gated.silu_and_mul(x), gated.gelu_and_mul(x)


def rotated(device: torch.device) -> object:
    x, joint = torch.rand(2, 3, 4, 16, device=device), torch.zeros(2, 5, 4, 16, device=device)
    weight, angles = torch.rand(16, device=device), torch.rand(3, 16, device=device)
    norm_rotary(x, weight, angles, angles, joint[:, 2:], eps=1e-6)
    return joint


def quantized(device: torch.device) -> object:
    x, left = torch.rand(3, 16, device=device), torch.rand(3, 32, device=device)
    return quantize_gelu_rows(x), quantize_gelu_rows(x, left)


def streams(device: torch.device) -> object:
    x, weight = torch.rand(2, 3, 16, device=device), torch.rand(9, 3, device=device)
    router, wide = Router(torch.rand(3, 16, device=device), 1e-6), torch.rand(2, 32, device=device)
    relu_above(wide[:, :16], 1.0)
    return (
        predict_streams(x, router, weight),
        correct_streams(x, wide[:, 16:].contiguous(), router, weight[:3].contiguous()),
        as_large_as(wide[:, :16], wide[:, 16:]),
    )


def pooled(device: torch.device) -> object:
    pool = TensorPool((4, 5), dtype=torch.bfloat16, device=device)
    pool._cells = torch.rand(2, 4, 5, device=device, dtype=torch.bfloat16)
    values = torch.rand(2, 4, 5, device=device)
    return pool.distances([1, 0], values), pool.weighted([[0, 1], [1, 1]], [[1.0, 2.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    "made", [normed, written, gates, modulated, rotated, quantized, streams, pooled]
)
def test_answers_have_the_shapes_of_a_cpu_s(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a device
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = made(torch.device("cuda"))

    def described(tensor: torch.Tensor) -> object:
        return tensor.shape, tensor.dtype

    device_of = tree_map_only(torch.Tensor, lambda tensor: tensor.device.type, found)
    assert "cpu" not in str(device_of)
    described_found = tree_map_only(torch.Tensor, described, found)
    assert described_found == tree_map_only(torch.Tensor, described, expected)


def test_a_step_is_sampled_by_one_operator() -> None:
    with FakeTensorMode():
        device = torch.device("cuda")
        sampler = Sampler(vocab_size=50, max_batch_size=2, device=device)
        rows = GroupedRows(
            slots_B=torch.arange(2, device=device),
            uniform_B=torch.rand(2, dtype=torch.float64, device=device),
            has_floor=True,
        )
        ids, is_finite = sampler._sample(torch.rand(2, 50, device=device), rows)
    assert (ids.device.type, ids.dtype, ids.shape) == ("cuda", torch.int64, (2,))
    assert is_finite.dtype is torch.bool


def test_a_launch_on_no_gpu_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="sample_rows"):
        sample_rows(torch.zeros(1, 2), None, None, torch.ones(1, 4), torch.zeros(1).long(), None)


def test_a_stream_s_convolution_has_its_shape() -> None:
    with FakeTensorMode():
        x, past = torch.rand(2, 3, 8, device="cuda"), torch.rand(4, 3, 2, device="cuda")
        weight, slots = torch.rand(5, 3, 3, device="cuda"), torch.arange(2, device="cuda")
        found = stream_conv(x, past, slots, None, weight, None, 2, 1, 4)
    assert found.shape == (2, 5, 4)

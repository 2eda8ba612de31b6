"""Norm, rotation and the write into pages against one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, write_pages
from triptych.core.runtime.kernels.rope_write import HeadNorm, HeadRules, Rotation, rope_write
from triptych.core.runtime.kernels.rotary import rotary
from triptych.core.runtime.kernels.triton import rope_write as kernel
from triptych.core.runtime.layers.rotary import RopeConfig, Rotary

pytestmark = pytest.mark.gpu
launch = on_device(kernel.launch)
PAGE, NUM_PAGES = 4, 5
TOLERANCES = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@dataclass(frozen=True)
class Case:
    """One shape of a layer. `centred` weights are float32 whatever the projection is."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_rotated: int = 16
    dtype: torch.dtype = torch.float32
    pages: torch.dtype = torch.float32
    norm: torch.dtype | None = None
    sections: tuple[int, ...] = ()
    is_interleaved: bool = False


CASES = [
    Case(),
    Case(num_heads=3, num_kv_heads=1, head_dim=24, num_rotated=24, norm=torch.float32),
    Case(num_rotated=6, head_dim=20, norm=torch.float32),
    Case(num_rotated=10, head_dim=22, is_interleaved=True),
    Case(is_interleaved=True, norm=torch.float32),
    Case(num_rotated=0, norm=torch.float32),
    Case(num_rotated=0, head_dim=18),
    Case(dtype=torch.bfloat16, pages=torch.bfloat16, norm=torch.bfloat16),
    Case(dtype=torch.bfloat16, pages=torch.bfloat16, norm=torch.float32, head_dim=32),
    Case(dtype=torch.float16, pages=torch.float16, norm=torch.float16, num_rotated=8),
    Case(sections=(2, 3, 3), num_heads=7, num_kv_heads=7),
]


def rotation_of(case: Case, num_tokens: int) -> Rotation | None:
    if not case.num_rotated:
        return None
    config = RopeConfig(
        num_rotated_dims=case.num_rotated,
        max_length=64,
        trained_length=64,
        sections=case.sections,
    )
    positions = torch.arange(3 * num_tokens).view(3, -1)[: 3 if case.sections else 1]
    rows = Rotary(config, torch.device("cpu")).rows(positions.squeeze(0), case.dtype)
    return Rotation(*rows, is_interleaved=case.is_interleaved)


def batch_of(slots: torch.Tensor) -> AttentionBatch:
    length = np.array([len(slots)])
    return AttentionBatch(
        page_table_BM=torch.zeros(1, 1, dtype=torch.int64),
        context_lengths_B=torch.tensor(length),
        query_starts_B=torch.zeros(1, dtype=torch.int64),
        write_slots_T=slots,
        num_decode_rows=0,
        host_query_lengths_B=length,
        host_context_lengths_B=length,
    )


def pages_of(case: Case) -> KvPages:
    shape = (NUM_PAGES, PAGE, case.num_kv_heads, case.head_dim)
    pages = KvPages.empty(shape, case.pages, torch.device("cpu"))
    for tensor in pages.tensors:
        tensor.zero_()
    return pages


def projection(case: Case, num_tokens: int) -> tuple[torch.Tensor, HeadNorm | None]:
    generator = torch.Generator().manual_seed(case.head_dim)
    num_heads = case.num_heads + 2 * case.num_kv_heads
    qkv = torch.randn(num_tokens, num_heads, case.head_dim, generator=generator).to(case.dtype)
    if case.norm is None:
        return qkv, None
    shape = (case.num_heads + case.num_kv_heads, case.head_dim)
    return qkv, HeadNorm((torch.rand(shape, generator=generator) + 0.5).to(case.norm), 1e-6)


def run(
    qkv: torch.Tensor,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    pages: KvPages,
    slots: torch.Tensor,
) -> torch.Tensor:
    num_qk_heads = qkv.shape[1] - pages.k_NPKD.shape[2]
    weight, eps = (None, 0.0) if norm is None else (norm.weight_XD, norm.eps)
    cos, sin = (None, None) if rotation is None else (rotation.cos_T1R, rotation.sin_T1R)
    is_interleaved = rotation is not None and rotation.is_interleaved
    qk, v = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
    return launch(qk, v, weight, eps, cos, sin, is_interleaved, *pages, slots)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_after_the_other(case: Case, num_tokens: int) -> None:
    qkv, norm = projection(case, num_tokens)
    rotation = rotation_of(case, num_tokens)
    slots = torch.randperm(NUM_PAGES * PAGE, generator=torch.Generator().manual_seed(2))
    slots = slots[:num_tokens].contiguous()
    expected_pages, pages = pages_of(case), pages_of(case)
    expected = rope_write(qkv, HeadRules(norm), rotation, expected_pages, batch_of(slots))
    found = run(qkv, norm, rotation, pages, slots)
    tolerance = {"rtol": TOLERANCES[case.dtype], "atol": TOLERANCES[case.dtype]}
    torch.testing.assert_close(found, expected, **tolerance)
    for written, wanted in zip(pages.tensors, expected_pages.tensors, strict=True):
        torch.testing.assert_close(written, wanted, **tolerance)
        assert written.flatten(0, 1)[slots].any(-1).all()


def test_float8_pages_hold_rounded_values() -> None:
    case = Case(pages=torch.float8_e4m3fn, norm=torch.float32)
    (qkv, norm), rotation, slots = (
        projection(case, 3),
        rotation_of(case, 3),
        torch.tensor([9, 0, 4]),
    )
    exact, pages = pages_of(Case()), pages_of(case)
    rope_write(qkv, HeadRules(norm), rotation, exact, batch_of(slots))
    run(qkv, norm, rotation, pages, slots)
    for stored, values in zip(pages.tensors, exact.tensors, strict=True):
        # Half of the last of three bits; below 2 ** -6, half of 2 ** -9.
        torch.testing.assert_close(stored.float(), values, rtol=2**-4, atol=2**-10)


@pytest.mark.parametrize(
    "case",
    [
        Case(pages=torch.int8, norm=torch.float32),
        Case(pages=torch.int8, num_rotated=6, head_dim=20, num_kv_heads=3, num_heads=3),
        Case(pages=torch.int8, num_rotated=0, head_dim=18),
    ],
)
def test_int8_pages_hold_multiples_of_scales(case: Case) -> None:
    (qkv, norm), rotation = projection(case, 4), rotation_of(case, 4)
    qkv[3, -1] = 0
    slots = torch.tensor([9, 0, 4, 2])
    exact, pages = pages_of(replace(case, pages=torch.float32)), pages_of(case)
    rope_write(qkv, HeadRules(norm), rotation, exact, batch_of(slots))
    run(qkv, norm, rotation, pages, slots)
    for values, cells, scale in zip(exact.tensors, pages[:2], pages[2:], strict=True):
        assert scale is not None
        # The interpreter cuts scales off, where a GPU rounds them.
        largest = values.abs().amax(3) / 127
        torch.testing.assert_close(scale.float(), largest, rtol=2**-7, atol=0)
        nearest = (values / scale.float().clamp(min=1e-9).unsqueeze(3)).round().clamp(-127, 127)
        difference = (cells - nearest).abs()  # values differ in the last bit, so ties may
        assert difference.max() <= 1
        assert difference.mean() < 1e-3
        assert cells.flatten(0, 1)[slots[:3]].abs().amax(2).eq(127).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_makes_its_head_none(bad: float) -> None:
    case, slots = Case(pages=torch.int8, num_rotated=0), torch.tensor([3, 1])
    qkv, _ = projection(case, 2)
    qkv[1, case.num_heads, 4] = bad
    pages = pages_of(case)
    run(qkv, None, None, pages, slots)
    assert pages.k_scale_NPK is not None
    is_bad = ~pages.k_scale_NPK.flatten(0, 1).float().isfinite()
    assert is_bad.nonzero().tolist() == [[1, 0]]


def test_a_token_without_a_slot_is_not_written() -> None:
    case = Case()
    (qkv, norm), pages = projection(case, 2), pages_of(case)
    run(qkv, norm, rotation_of(case, 2), pages, torch.tensor([-1, 6]))
    for written in pages.tensors:
        slots = written.flatten(0, 1).flatten(1).any(-1)
        assert slots.nonzero().flatten().tolist() == [6]


def test_writes_keys_and_values_without_queries() -> None:
    case, slots = Case(head_dim=10), torch.tensor([3, 17, 8])
    wide = torch.randn(2, case.num_kv_heads, 3, case.head_dim)
    k, v = (part.transpose(0, 1) for part in wide)  # heads first, as transformers has them
    pages, expected_pages = pages_of(case), pages_of(case)
    write_pages(k, v, expected_pages, batch_of(slots))
    assert launch(k, v, None, 0.0, None, None, False, *pages, slots).shape == (3, 0, 10)
    for written, wanted in zip(pages.tensors, expected_pages.tensors, strict=True):
        assert torch.equal(written, wanted)


def test_interleaved_pairs_turn_as_complex_numbers() -> None:
    rotation = rotation_of(Case(is_interleaved=True), 3)
    assert rotation is not None
    x = torch.randn(3, 2, 16)
    turns = torch.complex(rotation.cos_T1R[..., 8:], rotation.sin_T1R[..., 8:])
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(2, (8, 2))) * turns).flatten(2)
    found = rotary(x, rotation.cos_T1R, rotation.sin_T1R, is_interleaved=True)
    torch.testing.assert_close(found, expected)

"""Cells of pages: what they take, how close they are, and attention over them in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.paged_case import PagedShape, make_batch, make_case
from triptych.core.runtime.kernels.kv_pages import (
    KvPages,
    LatentPages,
    head_bytes,
    quantized,
    read_cells,
    write_cells,
)
from triptych.core.runtime.kernels.latent_attention import write_latents
from triptych.core.runtime.kernels.paged_attention import AttentionRule
from triptych.core.runtime.layers.attention import KvCache, KvLayout, KvShape, LatentShape

BFLOAT, FLOAT8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
CPU = torch.device("cpu")


def layout(dtype: torch.dtype) -> KvLayout:
    shape = KvShape(num_heads=9, num_kv_heads=3, head_dim=64)
    rows = LatentShape(num_heads=20, head_dim=72, value_dim=64)
    return KvLayout(shapes=(shape, rows, shape), page_size=32, dtype=dtype)


def test_bytes_of_a_page_are_those_of_its_tensors() -> None:
    for dtype in (torch.float32, BFLOAT, FLOAT8, INT8):
        kv = KvCache(layout(dtype), 4, CPU)
        assert sum(tensor.nbytes for tensor in kv.tensors) == kv.num_pages * kv.layout.page_bytes
        assert not any(tensor[-1].float().any() for tensor in kv.tensors)


def test_latents_take_a_fraction_of_keys_and_values() -> None:
    """GLM-4.7-Flash: 20 heads with keys and values of 256."""
    rows = LatentShape(num_heads=20, head_dim=512 + 64, value_dim=512)
    heads = KvShape(num_heads=20, num_kv_heads=20, head_dim=256)
    assert rows.token_bytes(BFLOAT) == 1152
    assert heads.token_bytes(BFLOAT) / rows.token_bytes(BFLOAT) > 17


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT, FLOAT8, INT8])
def test_values_of_latents_are_the_first_of_a_row(dtype: torch.dtype) -> None:
    pages = LatentPages.of_rows((3, 4, 12), 8, dtype, CPU)
    batch = replace(make_batch(torch.arange(3)[None], [12], [12]), write_slots_T=torch.arange(12))
    write_latents(torch.randn(12, 12), pages, batch)
    pages.check()
    rows, values = (
        read_cells(cells, pages.k_scale_NPK, torch.arange(12), torch.float32)
        for cells in (pages.k_NPKD, pages.v_NPKD)
    )
    assert rows.any()
    assert torch.equal(rows[..., :8], values)


def test_small_cells_take_half() -> None:
    assert 2 * head_bytes(64, FLOAT8) == head_bytes(64, BFLOAT)
    assert head_bytes(64, BFLOAT) / head_bytes(64, INT8) > 1.93
    assert head_bytes(128, BFLOAT) / head_bytes(128, INT8) > 1.96


def test_int8_is_within_half_a_multiple_of_its_own_scale() -> None:
    values = torch.randn(50, 3, 64) * torch.exp2(torch.arange(-75.0, 75.0).view(50, 3, 1))
    values[7, 1] = 0
    cells, scale = quantized(values, INT8)
    assert scale is not None
    assert cells[0].abs().max() == 127
    error = (cells.float() * scale.float().unsqueeze(2) - values).abs()
    assert (error <= 0.501 * scale.float().unsqueeze(2)).all()
    assert (scale.float() * 127 <= values.abs().amax(2) * 1.004).all()


def test_float8_saturates() -> None:
    cells, scale = quantized(torch.tensor([[[1e9, -500.0, 448.0, 3.1]]]), FLOAT8)
    assert scale is None
    assert cells.float().flatten().tolist() == [448.0, -448.0, 448.0, 3.0]


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT8, INT8])
def test_what_is_written_is_found_at_its_slot_alone(dtype: torch.dtype) -> None:
    pages = KvPages.empty((4, 2, 3, 8), dtype, CPU)
    for tensor in pages.tensors:
        tensor.zero_()
    values, slots = torch.randn(2, 3, 8), torch.tensor([5, 0])
    write_cells(values, pages.k_NPKD, pages.k_scale_NPK, slots)
    found = read_cells(pages.k_NPKD, pages.k_scale_NPK, slots, torch.float32)
    torch.testing.assert_close(found, values, rtol=2**-4, atol=0.02)
    others = torch.tensor([1, 2, 3, 4, 6, 7])
    assert not read_cells(pages.k_NPKD, pages.k_scale_NPK, others, torch.float32).any()
    assert not pages.v_NPKD.float().any()


@pytest.mark.parametrize("dtype", [FLOAT8, INT8])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_the_reference_reads_what_cells_stand_for(
    dtype: torch.dtype, soft_cap: float | None
) -> None:
    """Cells that were never written hold scales of NaN."""
    rows = [(1, 5), (1, 300), (12, 40)]
    case = make_case(rows, PagedShape(6, 2, 16, 4), (torch.float32, dtype), 4)
    rule = AttentionRule(scale=0.3, window=90, soft_cap=soft_cap)
    expected = case.exact().attend(rule)
    torch.testing.assert_close(case.attend(rule), expected, atol=1e-5, rtol=1e-5)


def test_pages_of_two_kinds_are_refused() -> None:
    pages = KvPages.empty((2, 4, 1, 8), INT8, CPU)
    for wrong in (
        pages._replace(k_scale_NPK=None),
        pages._replace(v_NPKD=pages.v_NPKD.float()),
        pages._replace(
            v_scale_NPK=pages.k_scale_NPK.float() if pages.k_scale_NPK is not None else None
        ),
        KvPages(*KvPages.empty((2, 4, 1, 8), BFLOAT, CPU)[:2], pages.k_scale_NPK),
    ):
        with pytest.raises(AssertionError):
            wrong.check()

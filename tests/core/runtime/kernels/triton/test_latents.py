"""The kernels of attention over latents, and of their write, against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.kernel_device import each_type, is_interpreted, on_device
from support.latent_case import CPU, LatentCase, LatentSizes, make_latents
from support.paged_case import make_batch
from triptych.core.runtime.kernels import latent_attention as operation
from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.latent_attention import RowRules, write_latents
from triptych.core.runtime.kernels.rope_write import Rotation

pytest.importorskip("triton")

from triptych.core.runtime.kernels.triton import (
    attention_tiles,
    decode_splits,
    latent_decode,
    latent_prefill,
    latent_write,
)

pytestmark = pytest.mark.gpu
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
TOLERANCE = {FLOAT: 1e-5 if is_interpreted() else 3e-5, HALF: 4e-3, BFLOAT: 3e-2}
SMALL = LatentSizes(num_heads=6, row_dim=24, value_dim=16, page_size=16)
ROWS = [(1, 1), (1, 300), (1, 64), (9, 9), (33, 90)]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are for CUDA alone; their launchers run where Triton interprets."""
    if not is_interpreted():
        return
    monkeypatch.setattr(attention_tiles, "latents_of", lambda dtype: "latent")
    monkeypatch.setattr(latent_decode, "latent_decode", latent_decode.launch)
    monkeypatch.setattr(latent_prefill, "latent_prefill", latent_prefill.launch)
    monkeypatch.setattr(latent_write, "latent_write", latent_write.launch)


def run(case: LatentCase, *, is_deterministic: bool = False) -> torch.Tensor:
    batch = replace(case.batch, is_deterministic=is_deterministic)
    return on_device(operation._on_gpu)(case.q_THD, case.pages, batch, case.scale)


def check(case: LatentCase, *, is_deterministic: bool = False) -> None:
    """Unwritten cells hold NaN, and unused entries of page tables garbage: neither is seen."""
    out_THV = run(case, is_deterministic=is_deterministic)
    assert out_THV.dtype is case.q_THD.dtype
    tolerance = TOLERANCE[out_THV.dtype]
    expected = case.exact().run()
    torch.testing.assert_close(out_THV.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", each_type())
def test_decode_rows_and_chunks_of_one_step(is_deterministic: bool, dtype: torch.dtype) -> None:
    check(make_latents(ROWS, SMALL, (dtype, dtype)), is_deterministic=is_deterministic)


@pytest.mark.parametrize(
    "sizes",
    [
        LatentSizes(1, 16, 16, 1),
        LatentSizes(7, 43, 33, 7),  # no power of two anywhere
        LatentSizes(71, 40, 32, 16),  # more heads than a tile has
        LatentSizes(20, 576, 512, 32),
    ],
)
def test_sizes(sizes: LatentSizes) -> None:
    case = make_latents([(1, 40), (3, 50)], sizes, (each_type()[0],) * 2)
    check(replace(case, scale=sizes.row_dim**-0.5))


@pytest.mark.parametrize("cells", [FLOAT8, INT8])
def test_small_cells(cells: torch.dtype) -> None:
    check(make_latents(ROWS, SMALL, (each_type()[0], cells)))


@pytest.mark.parametrize("rows_at_once", [1, 2])
def test_fixed_splits_take_rows_in_turns(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    case = make_latents([(1, 300)] * 3, SMALL, (FLOAT, FLOAT))
    expected = run(case, is_deterministic=True)
    most = rows_at_once * 2 * SMALL.num_heads * SMALL.value_dim
    monkeypatch.setattr(decode_splits, "_MAX_PARTIAL_VALUES", most)
    assert torch.equal(run(case, is_deterministic=True), expected)


def test_a_token_of_a_deterministic_step_is_bitwise_the_same_alone_and_in_any_chunk() -> None:
    case = make_latents(ROWS, SMALL, (each_type()[0],) * 2)
    together = run(case, is_deterministic=True).split([n for n, _ in ROWS])
    for row, expected in enumerate(together):
        length = len(expected)
        cuts = [(0, 1)] if length == 1 else [(0, 3), (3, length)]
        parts = [run(case.chunk(row, *ends), is_deterministic=True) for ends in cuts]
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("cells", [FLOAT, BFLOAT, FLOAT8, INT8])
def test_rows_are_written_as_torch_writes_them(cells: torch.dtype, is_interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    wide_TX = torch.randn(20, 30, generator=generator)
    angle_T1R = torch.randn(20, 1, 3, generator=generator).repeat(1, 1, 2)
    sign_R = torch.tensor([-1.0] * 3 + [1.0] * 3)
    turned = Rotation(angle_T1R.cos(), angle_T1R.sin() * sign_R, is_interleaved)
    norm_V = torch.randn(15, generator=generator)
    slots = torch.randperm(32, generator=generator)[:20]
    batch = replace(make_batch(torch.zeros(1, 2).long(), [20], [20]), write_slots_T=slots)
    for rules in (RowRules(norm_V, 1e-5, turned), None):
        expected, found = (empty(cells) for _ in range(2))
        rows_TD = wide_TX[:, 5:26]  # a part of a wider projection
        write_latents(rows_TD, expected, batch, rules)
        on_device(operation._write_on_gpu)(rows_TD, found, batch, rules)
        values = found.k_NPKD.float(), expected.k_NPKD.float()
        if cells is INT8:  # of other multiples where a rounded scale differs
            assert found.k_scale_NPK is not None
            assert expected.k_scale_NPK is not None
            scales = found.k_scale_NPK.float(), expected.k_scale_NPK.float()
            torch.testing.assert_close(*scales, atol=1e-4, rtol=8e-3)
        torch.testing.assert_close(*values, atol=2.0 if cells is INT8 else 2e-5, rtol=0.13)


def empty(cells: torch.dtype) -> LatentPages:
    pages = LatentPages.of_rows((2, 16, 21), 15, cells, CPU)
    for tensor in pages.tensors:
        tensor.view(torch.uint8).zero_()
    return pages

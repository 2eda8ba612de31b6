"""The native attention over latents against the torch reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.latent_case import CPU, LatentSizes, make_latents
from support.paged_case import make_batch
from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.latent_attention import write_latents
from triptych.core.runtime.kernels.native.library import NativeKernels

FLOAT, HALF = torch.float32, torch.bfloat16
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
CELLS = (FLOAT, HALF, INT8, FLOAT8)
TOLERANCE = {FLOAT: 1e-5, HALF: 2e-2, INT8: 2e-2, FLOAT8: 2e-2}  # as for other attention
SIZES = st.builds(
    lambda heads, value_dim, rope_dim, page_size: LatentSizes(
        heads, value_dim + rope_dim, value_dim, page_size
    ),
    st.sampled_from((1, 3, 20, 64, 70, 128)),
    st.sampled_from((5, 16, 20, 32, 64, 512)),
    st.sampled_from((0, 1, 8, 64)),
    st.sampled_from((1, 2, 16, 64)),
)
ROWS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 30)), st.integers(0, 200)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    sizes=SIZES,
    dtypes=st.tuples(st.sampled_from((FLOAT, HALF)), st.sampled_from(CELLS)),
    seed=st.integers(0, 1000),
)
def test_agrees_with_torch(
    kernels: NativeKernels,
    rows: list[tuple[int, int]],
    sizes: LatentSizes,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    case = replace(make_latents(rows, sizes, dtypes, seed), scale=sizes.row_dim**-0.5)
    out_THV = case.run(kernels)
    assert out_THV.dtype is dtypes[0]
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    expected = case.exact().run()
    torch.testing.assert_close(out_THV.float(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=20, deadline=None)
@given(
    rows=ROWS,
    sizes=SIZES,
    dtypes=st.sampled_from(((FLOAT, FLOAT), (HALF, HALF), (HALF, INT8), (FLOAT, FLOAT8))),
    num_threads=st.sampled_from((1, 2)),
)
def test_a_token_is_bitwise_the_same_in_any_batch_and_chunk(
    kernels: NativeKernels,
    rows: list[tuple[int, int]],
    sizes: LatentSizes,
    dtypes: tuple[torch.dtype, torch.dtype],
    num_threads: int,
) -> None:
    case = make_latents(rows, sizes, dtypes)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    together = case.run(kernels).split([n for n, _ in rows])
    torch.set_num_threads(before)
    for row, expected in enumerate(together):
        cuts = sorted({0, 1, len(expected) // 2, len(expected) - 1, len(expected)})
        chunks = [case.chunk(row, *ends).run(kernels) for ends in pairwise(cuts)]
        assert torch.equal(torch.cat(chunks), expected)


@pytest.mark.parametrize("dtype", CELLS)
@pytest.mark.parametrize("row_dim", [7, 72])
def test_rows_are_written_as_torch_writes_them(
    kernels: NativeKernels, dtype: torch.dtype, row_dim: int
) -> None:
    rows_TD = torch.randn(40, row_dim) * torch.exp2(torch.arange(-20.0, 20.0))[:, None]
    batch = make_batch(torch.zeros(1, 1, dtype=torch.int64), [40], [40])
    batch.write_slots_T = torch.randperm(64)[:40]
    found = []
    for native in (None, kernels):
        pages = LatentPages.of_rows((4, 16, row_dim), 5, dtype, CPU)
        for tensor in pages.tensors:
            tensor.view(torch.uint8).zero_()
        write_latents(rows_TD, pages, replace(batch, native=native))
        found.append([tensor.view(torch.uint8) for tensor in pages.tensors])
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_limits(kernels: NativeKernels) -> None:
    assert all(kernels.can_hold_latents(576, 32, dtype) for dtype in CELLS)
    assert not kernels.can_hold_latents(577, 32, HALF)
    assert not kernels.can_hold_latents(576, 3, HALF)
    assert not kernels.can_hold_latents(576, 32, torch.float16)

"""The native attention against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.native_pages import exactly, in_native_order, pages_of
from support.paged_case import PagedCase, PagedShape, make_batch, make_case
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionRule

FLOAT, HALF = torch.float32, torch.bfloat16
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
CELLS = (FLOAT, HALF, INT8, FLOAT8)

# Of values near 1: over all cells but float32's, probabilities (2 ** -9 each) and the result are
# rounded to bfloat16; what cells stand for is exact.
TOLERANCE = {FLOAT: 1e-5, HALF: 2e-2, INT8: 2e-2, FLOAT8: 2e-2}


SHAPES = st.builds(
    lambda kv_heads, group, head_dim, page_size: PagedShape(
        kv_heads * group, kv_heads, head_dim, page_size
    ),
    st.integers(1, 4),
    st.sampled_from((1, 2, 3, 5, 8)),
    st.sampled_from((1, 2, 6, 7, 16, 33, 40, 64, 80, 128, 256, 512)),
    st.sampled_from((1, 2, 8, 32, 64)),
)
RULES = st.builds(
    AttentionRule,
    scale=st.sampled_from((1.0, 0.5)),
    window=st.sampled_from((None, 1, 6, 32, 100, 10**6)),
    soft_cap=st.sampled_from((None, 0.7, 50.0)),
    sinks_H=st.sampled_from((None, torch.linspace(-3, 40, 64), torch.linspace(3, -200, 64))),
    v_scale=st.sampled_from((1.0, 0.3)),
)
ROWS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 70)), st.integers(0, 200)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(
    rows=ROWS,
    shape=SHAPES,
    dtypes=st.tuples(st.sampled_from((FLOAT, HALF)), st.sampled_from(CELLS)),
    rule=RULES,
    seed=st.integers(0, 1000),
)
def test_agrees_with_torch(
    kernels: NativeKernels,
    rows: list[tuple[int, int]],
    shape: PagedShape,
    dtypes: tuple[torch.dtype, torch.dtype],
    rule: AttentionRule,
    seed: int,
) -> None:
    case = make_case(rows, shape, dtypes, seed)
    rule = of_shape(rule, shape)
    out_THD = case.attend(rule, kernels)
    assert out_THD.dtype is dtypes[0]
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    torch.testing.assert_close(
        out_THD.float(), case.exact().attend(rule), atol=tolerance, rtol=tolerance
    )


def of_shape(rule: AttentionRule, shape: PagedShape) -> AttentionRule:
    """The rule for heads of this size, and as many sinks if it has any."""
    sinks_H = None if rule.sinks_H is None else rule.sinks_H[: shape.num_heads]
    return replace(rule, scale=rule.scale * shape.head_dim**-0.5, sinks_H=sinks_H)


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    shape=SHAPES,
    dtypes=st.sampled_from(((FLOAT, FLOAT), (HALF, HALF), (HALF, INT8), (FLOAT, FLOAT8))),
    rule=RULES,
    num_threads=st.sampled_from((1, 2)),
)
def test_a_row_is_bitwise_the_same_in_any_batch(
    kernels: NativeKernels,
    rows: list[tuple[int, int]],
    shape: PagedShape,
    dtypes: tuple[torch.dtype, torch.dtype],
    rule: AttentionRule,
    num_threads: int,
) -> None:
    case = make_case(rows, shape, dtypes, 0)
    rule = of_shape(rule, shape)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    together = case.attend(rule, kernels).split([n for n, _ in rows])
    torch.set_num_threads(before)
    for index, expected in enumerate(together):
        assert torch.equal(case.row(index).attend(rule, kernels), expected)


@pytest.mark.parametrize("dtype", CELLS)
@pytest.mark.parametrize("window", [None, 50])
def test_cutting_a_prompt_into_chunks_changes_nothing(
    kernels: NativeKernels, dtype: torch.dtype, window: int | None
) -> None:
    whole = make_case([(150, 150)], PagedShape(6, 2, 64, 16), (HALF, dtype), 5)
    table_BM = whole.batch.page_table_BM
    chunks = []
    for first, last in ((0, 1), (1, 38), (38, 149), (149, 150)):
        batch = make_batch(table_BM, [last - first], [last])
        case = PagedCase(whole.q_THD[first:last], whole.pages, batch)
        chunks.append(case.run(kernels, window))
    assert torch.equal(torch.cat(chunks), whole.run(kernels, window))


@pytest.mark.parametrize("dtype", [HALF, INT8])
def test_nan_stays_in_its_row(kernels: NativeKernels, dtype: torch.dtype) -> None:
    case = make_case([(1, 40)] * 3, PagedShape(6, 2, 64, 16), (HALF, dtype), 5)
    expected = case.run(kernels)
    page = case.batch.page_table_BM[1, 0]
    poisoned = case.pages.k_NPKD if dtype is HALF else case.pages.k_scale_NPK
    assert poisoned is not None
    poisoned[page, 3] = torch.nan
    out_THD = case.run(kernels)
    assert out_THD[1].isnan().all()
    assert torch.equal(out_THD[[0, 2]], expected[[0, 2]])


def test_queries_of_any_type_and_stride(kernels: NativeKernels) -> None:
    case = make_case([(3, 40), (1, 9)], PagedShape(4, 2, 32, 32), (FLOAT, HALF), 0)
    expected = case.run(kernels)
    half = replace(case, q_THD=case.q_THD.half())
    assert half.run(kernels).dtype is torch.float16
    torch.testing.assert_close(half.run(kernels).float(), expected, atol=1e-2, rtol=1e-2)
    strided = replace(case, q_THD=case.q_THD.repeat(1, 1, 2)[:, :, :32])
    assert torch.equal(strided.run(kernels), expected)


@pytest.mark.parametrize("dtype", CELLS)
@pytest.mark.parametrize(
    "shape", [PagedShape(2, 2, 7, 1), PagedShape(2, 2, 6, 4), PagedShape(2, 2, 64, 64)]
)
def test_a_written_cell_holds_one_token_alone(
    kernels: NativeKernels, shape: PagedShape, dtype: torch.dtype
) -> None:
    case = make_case([(1, 3 * shape.page_size)], shape, (FLOAT, dtype), 3)
    before = in_native_order(case.pages, kernels)
    for pages in case.pages.tensors:
        pages.flatten(0, 1)[1] = 0
    after = in_native_order(case.pages, kernels)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert 0 < (old.float() != new.float()).sum() <= old[0, 0].numel()
        assert not old[-1].float().any()


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
@pytest.mark.parametrize("head_dim", [1, 7, 40, 64])
def test_cells_are_written_as_torch_writes_them(
    kernels: NativeKernels, dtype: torch.dtype, head_dim: int
) -> None:
    """On a page of one token the orders are the same. Halves of a step fall where they fall."""
    generator = torch.Generator().manual_seed(head_dim)
    size = torch.exp2(torch.randint(-12, 8, (2, 300, 1, 2, 1), generator=generator).float())
    values = torch.randn(2, 300, 1, 2, head_dim, generator=generator) * size
    values[0, 0], values[0, 1, 0, 0, 0], values[1, 2] = 0, 1e30, 1e-42
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    every = every[every.isfinite()].sort().values
    ties = torch.cat((every, (every[1:] + every[:-1]) / 2, torch.tensor([449.0, -1e9])))
    if dtype is FLOAT8:
        values.flatten()[-len(ties) :] = ties[-values.numel() :]
    expected = pages_of(*values, dtype)
    copies = KvPages.empty((300, 1, 2, head_dim), dtype, torch.device("cpu"))
    slots = torch.arange(300)
    batch = replace(make_batch(slots[:1, None], [300], [300]), write_slots_T=slots)
    kernels.write_pages(*values.flatten(1, 2), copies, batch)
    for found, wanted in zip(copies.tensors, expected.tensors, strict=True):
        assert torch.equal(found.view(torch.int8), wanted.view(torch.int8))


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_every_cell_is_read_exactly(
    kernels: NativeKernels, dtype: torch.dtype, num_tokens: int
) -> None:
    """Weights of a power of two: values come back as they are."""
    every = torch.arange(-127.0, 129.0) / 64
    if dtype is FLOAT8:
        every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float().nan_to_num()
    every[-1] = 0
    values = torch.zeros(2, 2, 32, 1, 256)
    values[1, 0, :num_tokens, 0] = every
    batch = make_batch(torch.zeros(1, 1, dtype=torch.int64), [1], [num_tokens])
    case = PagedCase(torch.zeros(1, 1, 256), pages_of(*values, dtype), batch)
    expected = exactly(case.pages).v_NPKD[0, 0, 0]
    assert torch.equal(case.run(kernels)[0, 0], expected)
    assert dtype is INT8 or torch.equal(expected, every)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_so_in_int8(kernels: NativeKernels, bad: float) -> None:
    values = torch.ones(2, 2, 2, 1, 16)
    values[:, 0, 1, 0, 5] = bad
    for pages in (pages_of(*values, INT8), in_native_order(pages_of(*values, INT8), kernels)):
        scales = torch.stack(pages.tensors[2:]).float().flatten(1)
        assert (~scales.isfinite()).sum(1).tolist() == [1, 1]
        assert pages.k_NPKD.count_nonzero() == pages.v_NPKD.count_nonzero() == 3 * 16


def test_limits(kernels: NativeKernels) -> None:
    assert all(kernels.can_hold(64, (32, 1, 256), dtype) for dtype in CELLS)
    assert kernels.can_hold(64, (32, 1, 512), FLOAT)
    assert not kernels.can_hold(2, (4, 1, 8), torch.float16)
    assert not kernels.can_hold(2, (3, 1, 8), FLOAT)
    assert not kernels.can_hold(2, (4, 1, 513), FLOAT)
    assert not kernels.can_hold(65, (4, 1, 8), FLOAT)

"""The kernels of paged attention against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.kernel_device import each_type, is_interpreted, on_device
from support.paged_case import PagedCase, PagedShape, make_batch, make_case
from support.tiers import among
from triptych.core.runtime.kernels import paged_attention as operation
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.paged_attention import AttentionRule

pytest.importorskip("triton")

from triptych.core.runtime.kernels.triton import (
    attention_tiles,
    decode_splits,
    paged_decode,
    paged_prefill,
)
from triptych.core.runtime.kernels.triton.attention_tiles import heads_of

pytestmark = pytest.mark.gpu
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8

# Of values near 1: probabilities and results are rounded to the type of the queries.
# A GPU's powers and quotients differ from those of a CPU in the last two bits.
TOLERANCE = {FLOAT: 1e-5 if is_interpreted() else 3e-5, HALF: 2e-3, BFLOAT: 2e-2}

DECODE = [(1, 1), (1, 40), (1, 300), (1, 64)]
CHUNKS = [(9, 9), (5, 90), (33, 40)]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are for CUDA alone; their launchers run where Triton interprets.

    In float32, too, with the tiles of the types that models have: fewer, and the ones that matter.
    """
    if not is_interpreted():
        return
    monkeypatch.setattr(attention_tiles, "heads_of", lambda dim, dtype: heads_of(dim, BFLOAT))
    monkeypatch.setattr(paged_decode, "paged_decode", paged_decode.launch_paged_decode)
    monkeypatch.setattr(paged_prefill, "paged_prefill", paged_prefill.launch_paged_prefill)


def run(case: PagedCase, rule: AttentionRule, *, is_deterministic: bool = False) -> torch.Tensor:
    batch = replace(case.batch, is_deterministic=is_deterministic)
    return on_device(operation._on_gpu)(case.q_THD, case.pages, batch, rule)


def check(case: PagedCase, rule: AttentionRule, *, is_deterministic: bool = False) -> None:
    out_THD = run(case, rule, is_deterministic=is_deterministic)
    assert out_THD.dtype is case.q_THD.dtype
    tolerance = TOLERANCE[out_THD.dtype]
    expected = case.exact().attend(rule)
    torch.testing.assert_close(out_THD.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("window", among([None, 1, 50, 10**6], [None, 50]))
@pytest.mark.parametrize("dtype", each_type())
def test_decode_rows_and_chunks_of_one_step(
    window: int | None, is_deterministic: bool, dtype: torch.dtype
) -> None:
    """Unwritten cells hold NaN, and unused entries of page tables garbage: neither is seen."""
    case = make_case([*DECODE, *CHUNKS], PagedShape(6, 2, 32, 16), (dtype, dtype), 1)
    check(case, AttentionRule(scale=0.2, window=window), is_deterministic=is_deterministic)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("chunk", [1, 48, 10**6])
def test_chunks(chunk: int, is_deterministic: bool) -> None:
    case = make_case([*DECODE, *CHUNKS], PagedShape(6, 2, 32, 16), (FLOAT, FLOAT), 1)
    rule = AttentionRule(scale=0.2, window=chunk, is_chunked=True)
    check(case, rule, is_deterministic=is_deterministic)


@pytest.mark.parametrize(
    "shape",
    [
        PagedShape(1, 1, 16, 1),
        PagedShape(7, 1, 33, 7),  # no power of two anywhere
        PagedShape(4, 4, 80, 32),
        PagedShape(71, 1, 64, 16),  # more heads than a tile of decode rows has
        PagedShape(4, 2, 256, 64),
    ],
)
@pytest.mark.parametrize("dtype", each_type())
def test_shapes(shape: PagedShape, dtype: torch.dtype) -> None:
    case = make_case([(1, 60), (1, 3), (12, 40)], shape, (dtype, dtype), 2)
    check(case, AttentionRule(scale=0.2))


def test_the_tiles_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "heads_of", heads_of)
    case = make_case([(1, 60), (1, 3), (12, 40)], PagedShape(4, 2, 32, 16), (FLOAT, FLOAT), 2)
    check(case, AttentionRule(scale=0.2, window=20))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("stored", ["as the queries", FLOAT8, INT8])
def test_types(dtype: torch.dtype, stored: str | torch.dtype) -> None:
    dtypes = (dtype, stored if isinstance(stored, torch.dtype) else dtype)
    case = make_case([(1, 5), (1, 300), (40, 90)], PagedShape(4, 2, 32, 16), dtypes, 3)
    rule = AttentionRule(scale=0.2, k_scale=0.5, v_scale=2.0) if stored is FLOAT8 else None
    check(case, rule or AttentionRule(scale=0.2))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", each_type()[:2])
def test_soft_cap_and_sinks(window: int | None, is_deterministic: bool, dtype: torch.dtype) -> None:
    case = make_case([(1, 1), (1, 300), (20, 50)], PagedShape(6, 2, 32, 16), (dtype, dtype), 4)
    sinks_H = torch.linspace(-3, 6, 6)
    for soft_cap, sinks in ((2.0, None), (None, sinks_H), (30.0, sinks_H)):
        rule = AttentionRule(scale=1.5, window=window, soft_cap=soft_cap, sinks_H=sinks)
        check(case, rule, is_deterministic=is_deterministic)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("dtype", each_type()[:2])
def test_blocks_see_both_ways(window: int | None, dtype: torch.dtype) -> None:
    rows = [(1, 30), (70, 70), (40, 100)]
    case = make_case(rows, PagedShape(4, 2, 32, 16), (dtype, dtype), 5)
    positions_T = torch.cat([torch.arange(context - n, context) for n, context in rows])
    blocks_2T = torch.stack((positions_T, positions_T))
    for row_start, past, first, last in ((1, 0, 3, 40), (1, 0, 50, 69), (71, 60, 62, 99)):
        tokens = slice(row_start + first - past, row_start + last - past + 1)
        blocks_2T[0, tokens], blocks_2T[1, tokens] = first, last
    case.batch = replace(case.batch, blocks_2T=blocks_2T)
    check(case, AttentionRule(scale=0.2, window=window))


def test_padding_rows_are_zero_and_harmless() -> None:
    """A bucket's spare rows have length 0, and page tables and grids larger than rows need."""
    case = make_case([(1, 40), (1, 300), (1, 7)], PagedShape(4, 2, 32, 16), (FLOAT, FLOAT), 6)
    expected = run(case, AttentionRule(scale=0.2), is_deterministic=True)
    batch = case.batch
    table_BM = torch.nn.functional.pad(batch.page_table_BM, (0, 30, 0, 2), value=2**40)
    padded = make_batch(table_BM, [1] * 5, [40, 300, 7, 0, 0])
    q_THD = torch.nn.functional.pad(case.q_THD, (0, 0, 0, 0, 0, 2), value=torch.nan)
    wider = PagedCase(q_THD[:, :4], case.pages, padded)
    for is_deterministic in (False, True):
        out_THD = run(wider, AttentionRule(scale=0.2), is_deterministic=is_deterministic)
        torch.testing.assert_close(out_THD[:3], expected, atol=2e-6, rtol=2e-6)
        assert not out_THD[3:].any()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_deterministic_rows_are_bitwise_the_same_in_any_batch(
    window: int | None, dtype: torch.dtype
) -> None:
    rows = [(1, 3), (1, 300), (20, 70), (3, 3)]
    case = make_case(rows, PagedShape(6, 2, 32, 16), (dtype, dtype), 7)
    rule = AttentionRule(scale=0.2, window=window, sinks_H=torch.linspace(-1, 1, 6))
    together = run(case, rule, is_deterministic=True).split([n for n, _ in rows])
    for index, expected in enumerate(together):
        assert torch.equal(run(case.row(index), rule, is_deterministic=True), expected)


def test_cutting_a_prompt_into_chunks_changes_nothing() -> None:
    whole = make_case([(90, 90)], PagedShape(6, 2, 32, 16), (BFLOAT, BFLOAT), 8)
    table_BM, rule, chunks = whole.batch.page_table_BM, AttentionRule(scale=0.2, window=50), []
    for first, last in ((0, 2), (2, 39), (39, 90)):
        batch = make_batch(table_BM, [last - first], [last])
        case = PagedCase(whole.q_THD[first:last], whole.pages, batch)
        chunks.append(run(case, rule))
    assert torch.equal(torch.cat(chunks), run(whole, rule))


def test_splits_that_outgrow_memory_go_in_several_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(DECODE, PagedShape(6, 2, 32, 16), (FLOAT, FLOAT), 9)
    rule = AttentionRule(scale=0.2)
    expected = run(case, rule, is_deterministic=True)
    monkeypatch.setattr(decode_splits, "_MAX_PARTIAL_VALUES", 2 * 2 * 6 * 32)
    assert torch.equal(run(case, rule, is_deterministic=True), expected)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("num_wanted", among([3, 20], [20]))
def test_one_long_row_among_short_ones(
    num_wanted: int, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "num_wanted_splits", lambda device, num_tiles: num_wanted)
    rows = [(1, 130), (1, 4), (1, 2000), (1, 128), (1, 1), (1, 257)]
    case = make_case(rows, PagedShape(4, 2, 32, 16), (FLOAT, FLOAT), 10)
    sinks_H = torch.linspace(-1, 2, 4)
    for window in (None, 300):
        rule = AttentionRule(scale=0.2, window=window, soft_cap=20.0, sinks_H=sinks_H)
        check(case, rule, is_deterministic=is_deterministic)


def test_more_rows_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_splits, "MAX_ROWS", 3)
    case = make_case(DECODE, PagedShape(6, 2, 32, 16), (FLOAT, FLOAT), 11)
    check(case, AttentionRule(scale=0.2))


@pytest.mark.parametrize("stored", [FLOAT8, INT8])
def test_fake_tensors_of_a_gpu_pass(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As operators, without their launchers: nothing is read back, no device is mixed."""
    monkeypatch.undo()
    case = make_case([*DECODE, *CHUNKS], PagedShape(6, 2, 64, 16), (BFLOAT, stored), 1)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(x: torch.Tensor) -> torch.Tensor:
            return mode.from_tensor(x).to("cuda")

        names = ("page_table_BM", "context_lengths_B", "query_starts_B", "write_slots_T")
        batch = replace(case.batch, **{name: fake(getattr(case.batch, name)) for name in names})
        pages = KvPages(*(None if each is None else fake(each) for each in case.pages))
        rule = AttentionRule(scale=0.2, window=9, soft_cap=3.0)
        out_THD = operation.paged_attention(fake(case.q_THD), pages, batch, rule)
    assert out_THD.shape == case.q_THD.shape
    assert out_THD.dtype is BFLOAT
    assert out_THD.is_cuda

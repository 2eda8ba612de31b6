"""Attention of prompts by torch's library, against the reference over the same pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.gpu_rehearsal import rehearse_gpu
from support.kernel_products import assert_near, tolerance_of
from support.paged_case import PagedCase, PagedShape, make_case
from triptych.core.runtime.kernels import paged_attention
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.library_attention import attend_prompts, find_prompt_keys

ROWS = [(7, 7), (5, 20), (3, 33)]
"""New tokens and keys."""
SHAPES = {"alone": PagedShape(2, 2, 64, 16), "grouped": PagedShape(8, 2, 128, 16)}


def by_library(
    case: PagedCase, window: int | None, device: torch.device, spare_keys: int = 0
) -> torch.Tensor:
    """`spare_keys` more than there are, as the limits of a captured step have them."""
    batch = case.batch
    q_THD, table_BM, lengths_B, starts_B = (
        each.to(device)
        for each in (
            case.q_THD,
            batch.page_table_BM,
            batch.context_lengths_B,
            batch.query_starts_B,
        )
    )
    pages = KvPages(*(None if each is None else each.to(device) for each in case.pages))
    limits = (
        int(batch.host_query_lengths_B.max()),
        int(batch.host_context_lengths_B.max()) + spare_keys,
    )
    keys = find_prompt_keys(pages, table_BM, lengths_B, starts_B, len(q_THD), limits)
    return attend_prompts(q_THD, pages, keys, scale=q_THD.shape[2] ** -0.5, window=window).cpu()


def flash(  # noqa: PLR0917 - as torch has it
    q_THD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    returns_mask: bool,
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
    seqused_k: torch.Tensor,
) -> tuple[Any, ...]:
    """Torch's operator for rows of any length, by its definition."""
    assert is_causal
    assert query_starts.dtype == key_starts.dtype == seqused_k.dtype == torch.int32
    out_THD = torch.empty_like(q_THD)
    repeats = q_THD.shape[1] // k_LKD.shape[1]
    for row, num_keys in enumerate(seqused_k.tolist()):
        queries = slice(int(query_starts[row]), int(query_starts[row + 1]))
        first_key = int(key_starts[row])
        assert first_key + num_keys <= int(key_starts[row + 1])
        assert num_keys <= max_keys
        q, k, v = (
            q_THD[queries],
            k_LKD[first_key : first_key + num_keys],
            v_LKD[first_key : first_key + num_keys],
        )
        num_queries = len(q)
        assert num_queries <= max_queries
        ages = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        mask = ages >= 0
        if window_size_left is not None:
            assert window_size_right == 0
            mask &= ages <= window_size_left
        k, v = (each.repeat_interleave(repeats, 1).transpose(0, 1).float() for each in (k, v))
        scores = (q.transpose(0, 1).float() @ k.mT * scale).masked_fill(~mask, -torch.inf)
        out_THD[queries] = (scores.softmax(2) @ v).transpose(0, 1).to(q_THD.dtype)
    return (out_THD,)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cells", [torch.float32, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("spare_keys", [0, 10, 1000])
def test_each_token_attends_to_its_rows_past(
    shape: str,
    window: int | None,
    cells: torch.dtype,
    spare_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    case = make_case(ROWS, SHAPES[shape], (torch.float32, cells), seed=1)
    out_THD = by_library(case, window, torch.device("cpu"), spare_keys)
    assert_near(out_THD, case.run(None, window))


@pytest.mark.parametrize(
    ("backend", "limit", "is_used"),
    [("flash", 2**16, True), ("flash", 60, False), ("triton", 2**16, False)],
)
def test_a_step_takes_it_for_prompts_with_few_keys(
    backend: str, limit: int, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows are ours. The three prompts have 99 keys, counted as the longest one's."""
    called: list[int] = []

    def noted(q_THD: torch.Tensor, *given: Any, **named: Any) -> tuple[Any, ...]:
        called.append(len(q_THD))
        return flash(q_THD, *given, **named)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted)
    monkeypatch.setattr(paged_attention, "MAX_GATHERED_KEYS", limit)
    rows = [(1, 9), (1, 30), *ROWS]
    case = make_case(rows, SHAPES["grouped"], (torch.float32, torch.float32), seed=2)
    expected_THD = case.run(None)
    case.batch.backend = backend
    rehearse_gpu(monkeypatch)
    assert_near(case.run(None), expected_THD)
    assert called == ([sum(n for n, _ in ROWS)] if is_used else [])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spare_keys", [0, 10])
def test_the_librarys_operator_is_as_defined_here(
    shape: str, window: int | None, dtype: torch.dtype, spare_keys: int, cuda: torch.device
) -> None:
    case = make_case(ROWS, SHAPES[shape], (dtype, dtype), seed=1)
    out_THD = by_library(case, window, cuda, spare_keys)
    assert_near(out_THD, case.exact().run(None, window).to(dtype), tolerance_of(dtype))


def test_nothing_is_read_back() -> None:
    with FakeTensorMode():
        q_THD = torch.empty(12, 8, 128, dtype=torch.bfloat16, device="cuda")
        cells = torch.empty(9, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
        table_RM = torch.empty(2, 4, dtype=torch.int64, device="cuda")
        lengths_R, starts_R = torch.empty(2, 2, dtype=torch.int64, device="cuda")
        pages = KvPages(cells, cells)
        keys = find_prompt_keys(pages, table_RM, lengths_R, starts_R, 12, (12, 50))
        out_THD = attend_prompts(q_THD, pages, keys, scale=1.0, window=None)
    assert (out_THD.shape, out_THD.dtype) == (q_THD.shape, q_THD.dtype)

"""The paged attention reference against plain attention written out per row."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.paged_attention import (
    AttentionBatch,
    AttentionRule,
    paged_attention,
    write_pages,
)

PAGE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
PLAIN = AttentionRule(scale=0.3)


@dataclass
class Case:
    """Rows with a past; their keys and values dense for the reference and paged for us."""

    q_THD: torch.Tensor
    pages: KvPages
    batch: AttentionBatch
    dense: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def make_case(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Case:
    """`rows` are (query length, context length); decode rows come first."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_pages = [-(-context // PAGE) for _, context in rows]
    pages = torch.randperm(sum(num_pages), generator=generator).split(num_pages)
    table_BM = torch.full((len(rows), max(num_pages)), 2**40)  # garbage past a row's own pages
    storage = (sum(num_pages) + 1, PAGE, NUM_KV_HEADS, HEAD_DIM)
    k_pages, v_pages = torch.full(storage, torch.nan), torch.full(storage, torch.nan)
    k_pages[-1] = v_pages[-1] = 0
    k_pages, v_pages = k_pages.to(dtype), v_pages.to(dtype)
    dense, write_slots = [], []
    for row, (num_queries, context) in enumerate(rows):
        table_BM[row, : num_pages[row]] = pages[row]
        q = random(num_queries, NUM_HEADS, HEAD_DIM)
        k, v = random(context, NUM_KV_HEADS, HEAD_DIM), random(context, NUM_KV_HEADS, HEAD_DIM)
        slots = (pages[row][:, None] * PAGE + torch.arange(PAGE)).flatten()[:context]
        past = context - num_queries
        k_pages.flatten(0, 1)[slots[:past]] = k[:past]
        v_pages.flatten(0, 1)[slots[:past]] = v[:past]
        dense.append((q, k, v))
        write_slots.append(slots[past:])
    lengths = np.array([n for n, _ in rows])
    contexts = np.array([context for _, context in rows])
    batch = AttentionBatch(
        page_table_BM=table_BM,
        context_lengths_B=torch.from_numpy(contexts),
        query_starts_B=torch.from_numpy(np.cumsum(lengths) - lengths),
        write_slots_T=torch.cat(write_slots),
        num_decode_rows=int((lengths == 1).sum()),
        host_query_lengths_B=lengths,
        host_context_lengths_B=contexts,
    )
    new_k = torch.cat([k[-n:] for (_, k, _), (n, _) in zip(dense, rows, strict=True)])
    new_v = torch.cat([v[-n:] for (_, _, v), (n, _) in zip(dense, rows, strict=True)])
    pages = KvPages(k_pages, v_pages)
    write_pages(new_k, new_v, pages, batch)
    return Case(torch.cat([q for q, _, _ in dense]), pages, batch, dense)


def expected(case: Case, rule: AttentionRule) -> torch.Tensor:
    outs, window = [], rule.window
    for q, k, v in case.dense:
        repeats = NUM_HEADS // NUM_KV_HEADS
        k_SHD, v_SHD = (x.float().repeat_interleave(repeats, 1) for x in (k, v))
        scores_HQS = torch.einsum("qhd,shd->hqs", q.float(), k_SHD) * (rule.scale * rule.k_scale)
        if rule.soft_cap is not None:
            scores_HQS = torch.tanh(scores_HQS / rule.soft_cap) * rule.soft_cap
        position_Q = torch.arange(len(k))[len(k) - len(q) :]
        distance_QS = position_Q[:, None] - torch.arange(len(k))
        is_hidden = distance_QS < 0
        if window is not None:
            is_hidden |= distance_QS >= window
        weights_HQS = scores_HQS.masked_fill(is_hidden, -torch.inf).exp()
        sums_HQ = weights_HQS.sum(-1)
        if rule.sinks_H is not None:
            sums_HQ = sums_HQ + rule.sinks_H.exp().unsqueeze(1)
        probs_HQS = weights_HQS / sums_HQ.unsqueeze(2)
        outs.append(torch.einsum("hqs,shd->qhd", probs_HQS, v_SHD) * rule.v_scale)
    return torch.cat(outs)


BATCHES = {
    "one decode": [(1, 13)],
    "decodes of all ages": [(1, 1), (1, 40), (1, 4), (1, 300), (1, 700)],
    "one prompt": [(9, 9)],
    "a chunk with a past": [(5, 18)],
    "prompts of like size": [(8, 8), (5, 20), (7, 7)],
    "everything": [(1, 2), (1, 600), (3, 3), (33, 40), (30, 300), (1, 9)],
}


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_against_plain_attention(rows: list[tuple[int, int]], window: int | None) -> None:
    """Unwritten cells hold NaN and unused page-table entries garbage: neither may be seen."""
    case, rule = make_case(rows), AttentionRule(scale=0.3, window=window)
    out_THD = paged_attention(case.q_THD, case.pages, case.batch, rule)
    torch.testing.assert_close(out_THD, expected(case, rule), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_and_sinks(soft_cap: float | None, has_sinks: bool, window: int | None) -> None:
    case = make_case(BATCHES["everything"])
    sinks_H = torch.linspace(-2, 4, NUM_HEADS) if has_sinks else None
    rule = AttentionRule(scale=0.9, window=window, soft_cap=soft_cap, sinks_H=sinks_H)
    out_THD = paged_attention(case.q_THD, case.pages, case.batch, rule)
    torch.testing.assert_close(out_THD, expected(case, rule), atol=1e-5, rtol=1e-5)


def test_a_cache_in_float8_with_scales() -> None:
    case, rule = make_case(BATCHES["everything"]), AttentionRule(scale=0.3, k_scale=0.5, v_scale=2)
    dtype = torch.float8_e4m3fn
    pages = KvPages(case.pages.k_NPKD.to(dtype), case.pages.v_NPKD.to(dtype))
    out_THD = paged_attention(case.q_THD, pages, case.batch, rule)
    case.dense = [(q, *(x.to(dtype).float() for x in kv)) for q, *kv in case.dense]
    torch.testing.assert_close(out_THD, expected(case, rule), atol=1e-5, rtol=1e-5)


def test_half_precision_queries_over_a_float32_cache() -> None:
    case = make_case(BATCHES["everything"])
    half = case.q_THD.bfloat16()
    out_THD = paged_attention(half, case.pages, case.batch, PLAIN)
    assert out_THD.dtype is torch.bfloat16
    torch.testing.assert_close(out_THD.float(), expected(case, PLAIN), atol=0.05, rtol=0.05)


def test_writing_casts_to_the_cache() -> None:
    case = make_case([(1, 3), (2, 2)], torch.bfloat16)
    assert case.pages.k_NPKD.dtype is torch.bfloat16
    slot = case.batch.write_slots_T[0]
    assert torch.equal(case.pages.k_NPKD.flatten(0, 1)[slot], case.dense[0][1][-1])


def test_without_a_gpu_triton_is_not_imported() -> None:
    code = (
        "import sys, triptych.core.runtime.engine.token_runner;"
        "assert 'triptych.core.runtime.kernels.paged_attention' in sys.modules;"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'triton'];"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make_case([(1, 3)])
    with pytest.raises(AssertionError):
        paged_attention(case.q_THD[..., :4], case.pages, case.batch, PLAIN)
    with pytest.raises(AssertionError):
        paged_attention(case.q_THD[:, :5], case.pages, case.batch, PLAIN)

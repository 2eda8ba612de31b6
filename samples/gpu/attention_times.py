"""Paged attention at the shape of Llama 3 8B: decode, prompts, and rows of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from kernel_case import Case, randn, setting
from place import Place
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.library_attention import attend_prompts, find_prompt_keys

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 32
STAGES = (2, 3, 4)


def cases(place: Place) -> Iterator[Case]:
    """Decode steps, then prompts."""
    contexts: dict[str, Sequence[int]] = {
        "1 row of 1k": [1024],
        "64 rows of 1k": [1024] * 64,
        "64 rows of 4k": [4096] * 64,
        "256 rows of 1k": [1024] * 256,
        "32 rows of 2,100": [2100] * 32,
        "1 row of 32k": [32_768],
        "63 rows of 1k and one of 128k": [131_072, *[1024] * 63],
    }
    chunks = {"1k after 7k": (1024, 8192), "8k": (8192, 8192), "1k after 31k": (1024, 32_768)}
    if not place.is_gpu:
        contexts, chunks = {"2 rows of 40": [40, 20]}, {"8 after 32": (8, 40)}
    for name, lengths in contexts.items():
        yield _decode(place, name, lengths)
    for name, (num_queries, length) in chunks.items():
        yield _prefill(place, name, num_queries, length)


def _pages(place: Place, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values in pages in random order, the table of pages, and the lengths."""
    sizes = [-(-length // PAGE_SIZE) for length in lengths]
    shape = (2, sum(sizes) + 1, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pages_2NPKD = randn(place, *shape)
    pages_2NPKD[:, -1] = 0
    order = torch.randperm(sum(sizes)).split(sizes)
    table_BM = torch.full((len(lengths), max(sizes)), sum(sizes))
    for row, numbers in enumerate(order):
        table_BM[row, : len(numbers)] = numbers
    return pages_2NPKD, table_BM.to(place.device), torch.tensor(lengths, device=place.device)


def _decode(place: Place, name: str, lengths: Sequence[int]) -> Case:
    from triptych.core.runtime.kernels.triton import paged_decode

    pages_2NPKD, table_BM, lengths_B = _pages(place, lengths)
    q_BHD = randn(place, len(lengths), NUM_HEADS, HEAD_DIM)
    out_BHD = torch.empty_like(q_BHD)

    def ours() -> torch.Tensor:
        paged_decode.launch_paged_decode(
            *(q_BHD, *pages_2NPKD, None, None, table_BM, lengths_B, out_BHD),
            *(None, HEAD_DIM**-0.5, None, None, 1.0, False),
        )
        return out_BHD

    peers: dict[str, Any] = {}
    if len(set(lengths)) == 1:
        k, v = _gathered(pages_2NPKD, table_BM, lengths[0])
        query_BH1D = q_BHD[:, :, None]
        peers["torch_without_pages"] = partial(
            scaled_dot_product_attention, query_BH1D, k, v, enable_gqa=True
        )
    peers |= _by_stages(place, ours)
    num_bytes = 2 * sum(lengths) * NUM_KV_HEADS * HEAD_DIM * q_BHD.itemsize
    return Case(f"paged decode, {name}", ours, peers, num_bytes)


def _prefill(place: Place, name: str, num_queries: int, length: int) -> Case:
    from triptych.core.runtime.kernels.triton import paged_prefill

    pages_2NPKD, table_BM, lengths_B = _pages(place, [length])
    q_THD = randn(place, num_queries, NUM_HEADS, HEAD_DIM)
    out_THD, starts_B = torch.empty_like(q_THD), torch.zeros_like(lengths_B)

    def ours() -> torch.Tensor:
        paged_prefill.launch_paged_prefill(
            *(q_THD, *pages_2NPKD, None, None, table_BM, lengths_B, starts_B, 0, out_THD),
            *(None, None, HEAD_DIM**-0.5, None, None, 1.0),
        )
        return out_THD

    peers: dict[str, Any] = {}
    if place.is_gpu:
        peers["flash"] = partial(_by_flash, q_THD, KvPages(*pages_2NPKD), table_BM, lengths_B)
    if place.is_gpu and num_queries == length:
        peers["cudnn"] = partial(_by_cudnn, q_THD, pages_2NPKD, table_BM, length)
    if num_queries == length:
        k, v = _gathered(pages_2NPKD, table_BM, length)
        q = q_THD.transpose(0, 1)[None]
        attend = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        peers["torch_without_pages"] = lambda: attend()[0].transpose(0, 1)
    peers |= _by_stages(place, ours)
    num_pairs = num_queries * length - num_queries**2 / 2
    flops = 4 * NUM_HEADS * HEAD_DIM * num_pairs
    return Case(f"paged prefill, {name}", ours, peers, 2 * pages_2NPKD.nbytes, flops)


def _by_flash(
    q_THD: torch.Tensor, pages: KvPages, table_BM: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """By torch's FlashAttention; its plan is made by each layer here, in a step by the first."""
    limits = len(q_THD), table_BM.shape[1] * PAGE_SIZE
    starts_B = torch.zeros_like(lengths_B)
    keys = find_prompt_keys(pages, table_BM, lengths_B, starts_B, len(q_THD), limits)
    return attend_prompts(q_THD, pages, keys, scale=HEAD_DIM**-0.5)


def _by_cudnn(
    q_THD: torch.Tensor, pages_2NPKD: torch.Tensor, table_BM: torch.Tensor, length: int
) -> torch.Tensor:
    """By cuDNN through torch, with the gathering of keys; a whole prompt alone."""
    k, v = _gathered(pages_2NPKD, table_BM, length)
    q = q_THD.transpose(0, 1)[None]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _gathered(
    pages_2NPKD: torch.Tensor, table_BM: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of rows of one length, each row's one after the other."""
    k_BKSD, v_BKSD = (
        pages_NPKD[table_BM].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
        for pages_NPKD in pages_2NPKD
    )
    return k_BKSD, v_BKSD


def _by_stages(place: Place, ours: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """The same with other depths of the loop's pipeline, which only a device can compare."""
    from triptych.core.runtime.kernels.triton import attention_tiles

    def tiles(count: int) -> dict[Any, Any]:
        of = attention_tiles.TILES
        return {each: replace(of[each], num_stages=count) for each in of}

    stages = STAGES if place.is_gpu else STAGES[:1]
    return {f"stages_{n}": setting(attention_tiles, "TILES", tiles(n), ours) for n in stages}

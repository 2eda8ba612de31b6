"""Attention over latents at the shape of DeepSeek V3, and the index of its keys (V3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from kernel_case import Case, randn
from place import Place

PAGE_SIZE = 64
NUM_CHOSEN = 2048
SCALE = 192**-0.5


def cases(place: Place) -> Iterator[Case]:
    """Decode steps, a chunk of a prompt, the write, and both halves of the index."""
    contexts = ((1, 4096), (64, 1024), (64, 4096), (1, 32_768)) if place.is_gpu else ((2, 128),)
    for num_rows, length in contexts:
        yield _decode(place, num_rows, length)
    num_queries, length = (512, 4096) if place.is_gpu else (3, 64)
    yield _prefill(place, num_queries, length)
    for num_tokens in (64, 8192) if place.is_gpu else (3,):
        yield _write(place, num_tokens)
    for num_rows, length in ((1, 32_768), (64, 8192)) if place.is_gpu else ((2, 128),):
        yield from _index(place, num_rows, length)
    for num_rows in (1, 64) if place.is_gpu else (2,):
        yield _heads(place, num_rows)


def _sizes(place: Place) -> tuple[int, int, int]:
    """Heads, values of a row, and those of them that are the value."""
    return (128, 576, 512) if place.is_gpu else (2, 24, 16)


def _pages(place: Place, lengths: Sequence[int], row_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of rows of whole pages, and the table of pages."""
    num_pages = sum(lengths) // PAGE_SIZE
    order = torch.randperm(num_pages).view(len(lengths), -1)
    return randn(place, num_pages, PAGE_SIZE, 1, row_dim), order.to(place.device)


def _decode(place: Place, num_rows: int, length: int) -> Case:
    from triptych.core.runtime.kernels.triton import latent_decode

    num_heads, row_dim, value_dim = _sizes(place)
    pages_NPKD, table_BM = _pages(place, [length] * num_rows, row_dim)
    lengths_B = torch.full((num_rows,), length, device=place.device)
    q_BHD = randn(place, num_rows, num_heads, row_dim)
    given = q_BHD, pages_NPKD, None, table_BM, lengths_B

    def ours() -> torch.Tensor:
        out_BHV = q_BHD.new_empty(num_rows, num_heads, value_dim)
        latent_decode.launch(*given, out_BHV, SCALE, False)
        return out_BHV

    def theirs() -> torch.Tensor:
        keys_BSD = pages_NPKD[table_BM].flatten(1, 2).squeeze(2)
        weights_BHS = (q_BHD @ keys_BSD.mT).mul_(SCALE).softmax(-1)
        return weights_BHS @ keys_BSD[..., :value_dim]

    flops = 2 * num_rows * length * num_heads * (row_dim + value_dim)
    name = f"decode over latents, {num_rows} rows of {length}"
    return Case(name, ours, {"torch_with_gather": theirs}, pages_NPKD.nbytes, flops)


def _prefill(place: Place, num_queries: int, length: int) -> Case:
    from triptych.core.runtime.kernels.triton import latent_prefill

    num_heads, row_dim, value_dim = _sizes(place)
    pages_NPKD, table_BM = _pages(place, [length], row_dim)
    lengths_B = torch.full((1,), length, device=place.device)
    q_THD = randn(place, num_queries, num_heads, row_dim)
    rows = table_BM, lengths_B, torch.zeros_like(lengths_B), 0

    def ours() -> torch.Tensor:
        out_THV = q_THD.new_empty(num_queries, num_heads, value_dim)
        latent_prefill.launch(q_THD, pages_NPKD, None, *rows, out_THV, SCALE)
        return out_THV

    def theirs() -> torch.Tensor:
        keys_SD = pages_NPKD[table_BM[0]].flatten(0, 1).squeeze(1)
        position_S = torch.arange(length, device=place.device)
        is_later_TS = position_S > position_S[length - num_queries :, None]
        scores_HTS = (q_THD.transpose(0, 1) @ keys_SD.t()).mul_(SCALE)
        weights_HTS = scores_HTS.masked_fill_(is_later_TS, -torch.inf).softmax(-1)
        return (weights_HTS @ keys_SD[:, :value_dim]).transpose(0, 1)

    num_pairs = num_queries * length - num_queries**2 / 2
    flops = 2 * num_pairs * num_heads * (row_dim + value_dim)
    name = f"prompt over latents, {num_queries} of {length}"
    return Case(name, ours, {"torch_with_gather": theirs}, pages_NPKD.nbytes, flops)


def _write(place: Place, num_tokens: int) -> Case:
    from triptych.core.runtime.kernels.triton import latent_write

    _, row_dim, value_dim = _sizes(place)
    row_TD = randn(place, num_tokens, row_dim)
    cos_T1R, sin_T1R = randn(place, 2, num_tokens, 1, row_dim - value_dim)
    norm_V = randn(place, value_dim)
    pages_NPKD = randn(place, -(-num_tokens // PAGE_SIZE), PAGE_SIZE, 1, row_dim)
    slots_T = torch.randperm(num_tokens).to(place.device)
    return Case(
        f"write of latents, {num_tokens} tokens",
        partial(
            *(latent_write.launch, row_TD, norm_V, 1e-6, cos_T1R, sin_T1R, True),
            *(pages_NPKD, None, slots_T),
        ),
        {},
        2 * row_TD.nbytes,
    )


def _index(place: Place, num_rows: int, length: int) -> Iterator[Case]:
    """The scores of all keys, and the choice of the best."""
    from triptych.core.runtime.kernels.triton import key_index

    num_heads, head_dim, num_chosen = (64, 128, NUM_CHOSEN) if place.is_gpu else (2, 16, 20)
    pages_NPKD, table_BM = _pages(place, [length] * num_rows, head_dim)
    q_THD, weights_TH = (
        randn(place, num_rows, num_heads, head_dim),
        randn(place, num_rows, num_heads),
    )
    row_T = torch.arange(num_rows, device=place.device)
    rows = table_BM, row_T, torch.full_like(row_T, length)
    given = q_THD, weights_TH.float(), pages_NPKD, None, *rows, num_chosen, head_dim**-0.5

    def theirs() -> torch.Tensor:
        keys_BSD = pages_NPKD[table_BM].flatten(1, 2).squeeze(2)
        products_BHS = (q_THD @ keys_BSD.mT).mul_(head_dim**-0.5).relu_()
        return (weights_TH.unsqueeze(1) @ products_BHS).squeeze(1)

    name = f"{num_rows} rows of {length}"
    flops = 2 * num_rows * length * num_heads * head_dim
    scored = partial(key_index.launch_scores, *given)
    peers = {"torch_with_gather": theirs}
    yield Case(f"scores of keys, {name}", scored, peers, pages_NPKD.nbytes, flops)
    scores_TS = torch.randn(num_rows, length, device=place.device)
    slots_TC = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=place.device)
    yield Case(
        f"choice of {num_chosen} keys, {name}",
        partial(key_index.launch_choice, scores_TS, *rows, slots_TC, PAGE_SIZE),
        {"topk": partial(torch.topk, scores_TS, num_chosen)},
        scores_TS.nbytes + slots_TC.nbytes,
    )


def _heads(place: Place, num_rows: int) -> Case:
    """The product that brings queries into the space of latents, in deterministic mode."""
    from triptych.core.runtime.kernels.triton import head_linear

    num_heads, _, value_dim = _sizes(place)
    num_inputs = 128 if place.is_gpu else 16
    x_THI = randn(place, num_rows, num_heads, num_inputs)
    weight_HOI = randn(place, num_heads, value_dim, num_inputs)
    return Case(
        f"product for each of {num_heads} heads, {num_rows} rows",
        partial(head_linear.launch, x_THI, weight_HOI),
        {"torch": lambda: torch.bmm(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)},
        weight_HOI.nbytes + x_THI.nbytes,
        2 * num_rows * num_heads * num_inputs * value_dim,
    )

"""From logits to tokens, at the vocabulary of Llama 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_case import Case, randn
from place import Place

FILTERS = {"top-p 0.9": (1.0, 0.0, 0.9, 0.0), "top-k 50": (1.0, 50.0, 1.0, 0.0)}
"""Temperature, top-k, top-p and min-p."""


def cases(place: Place) -> Iterator[Case]:
    """Greedy rows, filtered ones, and penalties."""
    vocab_size = 128_256 if place.is_gpu else 600
    for num_rows in (1, 64, 256) if place.is_gpu else (2,):
        logits_BV = 4 * randn(place, num_rows, vocab_size)
        yield _greedy(logits_BV)
        for name, shape in FILTERS.items():
            yield _filtered(logits_BV.float(), name, shape)
    yield _penalties(place, 64 if place.is_gpu else 2, vocab_size)


def _greedy(logits_BV: torch.Tensor) -> Case:
    from triptych.core.runtime.kernels.triton import sampling

    shape_S4, slots_B, _ = _state(logits_BV, (1.0, 1.0, 1.0, 0.0))
    return Case(
        f"greedy, {len(logits_BV)} rows",
        lambda: sampling.launch(logits_BV, None, None, shape_S4, slots_B, None)[0],
        {"argmax": partial(torch.argmax, logits_BV, -1)},
        logits_BV.nbytes,
    )


def _filtered(logits_BV: torch.Tensor, name: str, shape: tuple[float, ...]) -> Case:
    from triptych.core.runtime.kernels.triton import sampling

    shape_S4, slots_B, uniforms_B = _state(logits_BV, shape)
    return Case(
        f"{name}, {len(logits_BV)} rows",
        lambda: sampling.launch(logits_BV, None, None, shape_S4, slots_B, uniforms_B)[0],
        {"torch": _by_torch(logits_BV, shape, uniforms_B)},
        logits_BV.nbytes,
    )


def _state(
    logits_BV: torch.Tensor, shape: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parameters of all slots, the slot of each row, and random numbers."""
    num_rows, device = len(logits_BV), logits_BV.device
    shape_S4 = torch.tensor([shape] * num_rows, device=device)
    uniforms_B = torch.rand(num_rows, dtype=torch.float64, device=device)
    return shape_S4, torch.arange(num_rows, device=device), uniforms_B


def _by_torch(
    logits_BV: torch.Tensor, shape: tuple[float, ...], uniforms_B: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The reference of `core.runtime.sampling`."""
    from triptych.core.runtime.sampling.filters import nucleus_thresholds, sample

    top_k_B, top_p_B = (logits_BV.new_full((len(logits_BV),), shape[place]) for place in (1, 2))

    def call() -> torch.Tensor:
        probs_BV = logits_BV.softmax(-1)
        least_B = nucleus_thresholds(probs_BV, top_k_B, top_p_B)
        return sample(torch.where(probs_BV >= least_B[:, None], probs_BV, 0.0), uniforms_B)

    return call


def _penalties(place: Place, num_rows: int, vocab_size: int) -> Case:
    from triptych.core.runtime.kernels.triton import penalties

    logits_RV = randn(place, num_rows, vocab_size).float()
    counts_SV = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=place.device)
    scales_S3 = torch.ones(num_rows, 3, device=place.device)
    slots_R = torch.arange(num_rows, device=place.device)
    return Case(
        f"penalties, {num_rows} rows",
        partial(penalties.launch, logits_RV, counts_SV, scales_S3, slots_R, 2**30 - 1),
        {},
        2 * logits_RV.nbytes + counts_SV.nbytes,
    )

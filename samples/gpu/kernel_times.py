"""The time of each family of kernels at sizes of real models, with torch's and the limits.

Sizes are those of Llama 3 8B, Qwen3-30B-A3B, DeepSeek V3, Qwen3-Next, FLUX.1 and codecs. Without a
GPU the kernels run in Triton's interpreter, on small tensors. `compile_ahead.py`, and a test by it,
find kernels that no case launches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import limits
import torch
from kernel_case import Case, Limits
from place import Place, Record, error_text, record

FAMILIES = (
    "attention_times",
    "image_times",
    "product_times",
    "sampling_times",
    "latent_times",
    "state_times",
    "small_times",
)
LEAST_S = 4


def run(place: Place) -> Iterator[Record]:
    """The cases of all families, in order of what is to be decided from them."""
    if not place.is_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    rates = limits.read_rates(place) | limits.matrix_rate(place)
    bounds = Limits(rates["read_bytes_per_s"], rates["flops_per_s"])
    num_left = 0
    for family in FAMILIES:
        for case in _cases(family, place):
            if place.left_s < LEAST_S:
                num_left += 1
                continue
            yield measured(case, place, bounds)
            place.release()
    if num_left:
        yield record("left out", f"{num_left} cases: no time was left")


def _cases(family: str, place: Place) -> Iterator[Case]:
    """A family's cases; one that cannot be made becomes a case that fails."""
    try:
        yield from import_module(family).cases(place)
    except Exception as error:  # one family that fails must not end the others
        yield Case(family, partial(_fail, error))


def _fail(error: Exception) -> object:
    raise error


@torch.inference_mode()
def measured(case: Case, place: Place, bounds: Limits) -> Record:
    """Microseconds of ours, of the limit and of each peer, and the difference from the first."""
    try:
        ours = case.ours()
        seconds = place.device_s(case.ours)
    except Exception as error:  # one case that fails must not end the others
        return record(case.name, error_text(error))
    figures: dict[str, object] = {"us": 1e6 * seconds}
    if bound_s := bounds.seconds(case):
        figures |= {"limit_us": 1e6 * bound_s, "share": bound_s / seconds}
    errors = []
    for name, peer in case.peers.items():
        try:
            theirs = peer()
            figures[f"{name}_us"] = 1e6 * place.device_s(peer)
        except Exception as error:  # a peer may be missing, or not support the case
            errors.append(f"{name}: {str(error).strip().splitlines()[0][:200]}")
            continue
        if "difference" not in figures and _is_comparable(ours, theirs):
            figures["difference"] = _difference(ours, theirs)
    return record(case.name, "; ".join(errors) or None, **figures)


def _is_comparable(ours: object, theirs: object) -> bool:
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return False
    is_other = ours.data_ptr() != theirs.data_ptr()
    return is_other and ours.numel() == theirs.numel() and ours.is_floating_point()


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The distance of two results, relative to the size of the second."""
    wanted = theirs.float().flatten()
    return float((ours.float().flatten() - wanted).norm() / wanted.norm())

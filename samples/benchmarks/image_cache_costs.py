"""The costs of step caches on large models with random weights: only processor time, no images.

    python samples/benchmarks/image_cache_costs.py --blocks 6 --repeats 5

Layers are as wide as those of FLUX.1, Stable Diffusion 3 and Wan 2.1 (1.3B), in bfloat16; there are
fewer of them, as memory allows. For each cache, a step that it computes and one that it skips,
relative to a step without a cache, taking turns. The cost of a cache (a pass through the layers
around the blocks, through the first block, and its own arithmetic) does not grow with the number of
blocks: at the whole model's size its share is smaller, which the last two columns estimate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from rich.console import Console
from rich.table import Table
from torch import nn

from triptych.modalities.diffusion.engine.caches.methods import (
    CacheMethod,
    first_block,
    magcache,
    planned,
    taylorseer,
    teacache,
)
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

NUM_STEPS = 6
NUM_TOKENS, NUM_WORDS = 256, 64  # of an image of 256 x 256
_ALL, _FIRST_AND_LAST = [True] * NUM_STEPS, [True, *[False] * (NUM_STEPS - 2), True]
_NEVER = 1e9
_EVEN = [1.0] * NUM_STEPS

METHODS: Mapping[str, tuple[CacheMethod, CacheMethod]] = {
    "planned": (planned(_ALL), planned(_FIRST_AND_LAST)),
    "TeaCache": (
        teacache("", threshold=0, coefficients=(1, 0)),
        teacache("", threshold=_NEVER, coefficients=(1, 0)),
    ),
    "FBCache": (first_block(threshold=-1), first_block(threshold=_NEVER)),
    "TaylorSeer": (taylorseer(warmup=NUM_STEPS), taylorseer(warmup=1, interval=NUM_STEPS)),
    "MagCache": (
        magcache(_EVEN, retention=1),
        magcache(_EVEN, threshold=_NEVER, max_skips=NUM_STEPS, retention=0),
    ),
}
"""Each cache with settings that compute every step, and that skip all between first and last."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its depth, how large it is in whole, and one row's arguments."""

    open: Callable[[int], nn.Module]
    num_whole: float
    sample: tuple[int, ...]
    rows: Mapping[str, tuple[int, ...]]
    shared: Mapping[str, tuple[int, ...]]


def _flux(num_blocks: int) -> nn.Module:
    num_dual = max(1, num_blocks // 3)
    model: nn.Module = FluxTransformer2DModel(num_layers=num_dual, num_single_layers=2 * num_dual)
    return model


def _sd3(num_blocks: int) -> nn.Module:
    model: nn.Module = SD3Transformer2DModel(
        num_layers=num_blocks,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=96,
    )
    return model


def _wan(num_blocks: int) -> nn.Module:
    model: nn.Module = WanTransformer3DModel(
        num_layers=num_blocks, num_attention_heads=12, ffn_dim=8960
    )
    return model


SHAPES: Mapping[str, Shape] = {
    "FLUX.1": Shape(
        _flux,
        11.9e9,
        (NUM_TOKENS, 64),
        {"encoder_hidden_states": (NUM_WORDS, 4096), "pooled_projections": (768,)},
        {"txt_ids": (NUM_WORDS, 3), "img_ids": (NUM_TOKENS, 3)},
    ),
    "SD3": Shape(
        _sd3,
        2.03e9,
        (16, 32, 32),
        {"encoder_hidden_states": (NUM_WORDS, 4096), "pooled_projections": (2048,)},
        {},
    ),
    "Wan 2.1": Shape(
        _wan, 1.42e9, (16, 1, 32, 32), {"encoder_hidden_states": (NUM_WORDS, 4096)}, {}
    ),
}


HEADS = ("cache", "computed / uncached", "skipped / uncached", "skipped, whole", "13 of 50, whole")


class Trial:
    """One model, and the time of its steps."""

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        self.module = shape.open(num_blocks).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        self._denoiser = Denoiser(open_model(self.module))
        self._sample = torch.randn(shape.sample)
        rows = {name: torch.randn(size).bfloat16() for name, size in shape.rows.items()}
        shared = {name: torch.zeros(size) for name, size in shape.shared.items()}
        self._conditioning = Conditioning(rows=rows, shared=shared)

    def step_s(self, method: CacheMethod | None) -> float:
        """Median processor time of the steps between the first and the last."""
        with self._row(method) as row:
            seconds = list(self._steps(row))
        return statistics.median(seconds[1:-1])

    def _steps(self, row: DenoiseRow) -> Iterator[float]:
        while not row.is_done:
            started_s = time.process_time()
            self._denoiser.step([row])
            yield time.process_time() - started_s

    @contextmanager
    def _row(self, method: CacheMethod | None) -> Iterator[DenoiseRow]:
        pools = TensorPools()
        config = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
        generator = torch.Generator().manual_seed(0)
        spacing = Spacing(num_steps=NUM_STEPS)
        sample = start_row(self._sample, config, spacing, generator=generator, pools=pools)
        cache = None if method is None else RowCache(method, NUM_STEPS, pools)
        branch = GuidanceBranch(conditioning=self._conditioning, cache=cache)
        row = DenoiseRow(sample=sample, branches=[branch])
        try:
            yield row
        finally:
            row.release()


def _shares(trial: Trial, repeats: int) -> dict[str, tuple[list[float], list[float]]]:
    """Of each cache: computed and skipped steps over an uncached one of the same turn."""
    trial.step_s(None)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in METHODS}
    for _ in range(repeats):
        for name, (always, never) in METHODS.items():
            plain_s = trial.step_s(None)
            found[name][0].append(trial.step_s(always) / plain_s)
            found[name][1].append(trial.step_s(never) / plain_s)
    return found


def _spread(shares: Sequence[float]) -> str:
    middle = statistics.median(shares)
    return f"{middle:.3f} ({min(shares):.3f} to {max(shares):.3f})"


@torch.inference_mode()
def main() -> None:
    """One table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in args.models:
        trial = Trial(SHAPES[name], args.blocks)
        num_weights = sum(weight.numel() for weight in trial.module.parameters())
        scale = num_weights / SHAPES[name].num_whole
        title = f"{name}, {args.blocks} blocks, {num_weights / 1e6:.0f} M"
        table = Table(*HEADS, title=title)
        for method, (computed, skipped) in _shares(trial, args.repeats).items():
            skip = scale * statistics.median(skipped)
            compute = 1 + scale * (statistics.median(computed) - 1)
            cells = _spread(computed), _spread(skipped), f"{skip:.4f}"
            table.add_row(method, *cells, f"{50 / (13 * compute + 37 * skip):.2f} x")
        Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Every family on tiny random weights: rows together, in parts, cached, and against diffusers."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig
from torch import Tensor

from support.denoiser_families import TINY, build, conditioning_of, sample_of
from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.engine.caches.decisions import GateSignal
from triptych.modalities.diffusion.engine.caches.methods import (
    Bounds,
    CacheMethod,
    Level,
    first_block,
    magcache,
    taylorseer,
    teacache,
)
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import (
    Batch,
    Blocks,
    DenoiseModel,
    DenoiserFamily,
)
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.families.table import family_of, open_model
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

SPANS = [name for name in TINY if family_of(type(name, (), {})()).span]
# What diffusers says of itself: a class it moved, a cast that a CPU does not need.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]
COVERAGE = Path(__file__).with_name("diffusion_coverage.txt")
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


def batch_of(name: str) -> Batch:
    return Batch(
        samples=torch.stack([sample_of(name, seed) for seed in range(3)]),
        times=torch.tensor([900.0, 500.0, 20.0]),
        conditioning=[conditioning_of(name, seed) for seed in range(3)],
    )


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def open_row(
    name: str, seed: int, num_steps: int, method: CacheMethod | None, pools: TensorPools
) -> DenoiseRow:
    sample = start_row(
        sample_of(name, seed),
        FLOW,
        Spacing(num_steps=num_steps),
        generator=torch.Generator(),
        pools=pools,
    )
    slot = RowCache(method, num_steps, pools) if method else None
    return DenoiseRow(
        sample=sample,
        branches=[GuidanceBranch(conditioning=conditioning_of(name, seed), cache=slot)],
    )


def finish(model: DenoiseModel, rows: list[DenoiseRow]) -> list[Tensor]:
    denoiser = Denoiser(model)
    while running := [row for row in rows if not row.is_done]:
        denoiser.step(running)
    samples = [row.sample.sample for row in rows]
    for row in rows:
        row.release()
    return samples


def decisions(row: DenoiseRow) -> tuple[int, int]:
    slot = row.branches[0].cache
    assert slot is not None
    return slot.decisions.num_computed, slot.decisions.num_skipped


@pytest.mark.parametrize("name", TINY)
def test_rows_at_different_times_are_what_each_is_alone(name: str) -> None:
    model, batch = DenoiseModel(build(name), family_of(build(name))), batch_of(name)
    together = model.velocity(batch)
    for row in range(3):
        assert close(model.velocity(batch.select([row])), together[[row]])
    moved = Batch(samples=batch.samples, times=batch.times - 10, conditioning=batch.conditioning)
    assert not torch.allclose(model.velocity(moved), together, atol=1e-6)


@pytest.mark.parametrize("signal", [None, *GateSignal])
@pytest.mark.parametrize("name", SPANS)
def test_the_parts_of_a_run_make_the_run(name: str, signal: GateSignal | None) -> None:
    model, batch = open_model(build(name)), batch_of(name)
    assert isinstance(model, SpanModel)
    whole = model.velocity(batch)
    probed = model.probe(batch, signal)
    velocity, hidden = model.span(batch, probed)
    assert close(velocity, whole)
    assert close(model.head(batch, hidden), whole)
    assert not close(model.head(batch, probed.base), whole, 1e-4)
    some, chosen = batch.select([2, 0]), probed.select([2, 0])
    assert close(model.span(some, chosen)[0], whole[[2, 0]])
    if signal is not None:
        alone = model.probe(some, signal).signal
        assert alone is not None
        assert chosen.signal is not None
        assert close(alone, chosen.signal)


def test_coverage_is_as_recorded() -> None:
    """Which classes run with a cache at which level, beside diffusers' own `enable_cache`."""
    lines = []
    for name in sorted(TINY):
        velocity = _runs(name, taylorseer(interval=2, warmup=1))
        span = name in SPANS and _runs(name, first_block(threshold=1e9))
        theirs = _runs_under_diffusers(name)
        marks = ("yes" if ran else "-" for ran in (velocity, span, theirs))
        lines.append("  ".join([name.ljust(42), *(mark.ljust(8) for mark in marks)]).rstrip())
    columns = [line.split() for line in lines]
    counts = [sum(column[index] == "yes" for column in columns) for index in (1, 2, 3)]
    assert counts[:2] == [len(TINY), len(SPANS)]
    header = "  ".join(["class".ljust(42), "velocity", "probe   ", "diffusers' FBCache"])
    total = "  ".join([f"{len(lines)} classes".ljust(42), *(str(c).ljust(8) for c in counts)])
    assert COVERAGE.read_text().splitlines() == [header, *lines, total.rstrip()]


def _runs(name: str, method: CacheMethod) -> bool:
    pools = TensorPools()
    rows = [open_row(name, seed, 5, method, pools) for seed in range(2)]
    samples = finish(open_model(build(name)), rows)
    skips = [decisions(row)[1] for row in rows]
    return all(sample.isfinite().all() for sample in samples) and min(skips) > 0


def _runs_under_diffusers(name: str) -> bool:
    """Whether a second call under their first block cache gives what its steps should."""
    module: Any = build(name)
    model = DenoiseModel(module, family_of(module))
    batch = batch_of(name).select([0])
    try:
        module.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        with module.cache_context("cond"):
            model.velocity(batch)
            again = model.velocity(batch)
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError):
        return False
    return bool(again.isfinite().all())


@pytest.mark.parametrize("threshold", [0.3, 0.45, 0.6])
def test_fbcache_is_diffusers_on_flux(threshold: float) -> None:
    name, num_steps = "FluxTransformer2DModel", 12
    unbounded = Bounds(max_skips=num_steps, forces_last=False)
    method = replace(first_block(threshold=threshold), bounds=unbounded)
    row = open_row(name, 1, num_steps, method, TensorPools())
    slot = row.branches[0].cache
    assert slot is not None
    ours = finish(open_model(build(name)), [row])[0]
    module: Any = build(name)
    module.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    theirs, computed = _diffusers_run(module, name, num_steps)
    assert slot.decisions.num_computed == computed < num_steps
    assert close(ours, theirs)


def test_magcache_is_diffusers_on_flux() -> None:
    name, num_steps = "FluxTransformer2DModel", 12
    ratios = [1.0, *(1 + 0.01 * math.sin(step) for step in range(1, num_steps))]
    ratios[-1] = 2.0  # so that both compute the last step
    row = open_row(name, 1, num_steps, magcache(ratios), TensorPools())
    slot = row.branches[0].cache
    assert slot is not None
    ours = finish(open_model(build(name)), [row])[0]
    module: Any = build(name)
    module.enable_cache(MagCacheConfig(num_inference_steps=num_steps, mag_ratios=ratios))
    theirs, computed = _diffusers_run(module, name, num_steps)
    assert slot.decisions.num_computed == computed < num_steps
    assert close(ours, theirs)


def _diffusers_run(module: Any, name: str, num_steps: int) -> tuple[Tensor, int]:
    """The trajectory under diffusers' cache, and how often the last block ran."""
    calls: list[int] = []
    tail = module.single_transformer_blocks[-1]
    tail.attn.register_forward_hook(lambda *_: calls.append(1))
    model = DenoiseModel(module, family_of(module))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(num_steps)
    sample = sample_of(name, 1)[None]
    with module.cache_context("cond"):
        for time in scheduler.timesteps:
            batch = Batch(samples=sample, times=time[None], conditioning=[conditioning_of(name, 1)])
            sample = scheduler.step(model.velocity(batch), time, sample, return_dict=False)[0]
    return sample[0], len(calls)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel"])
def test_mixed_caches_in_one_batch_are_what_each_is_alone(name: str, level: Level) -> None:
    model, pools = open_model(build(name)), TensorPools()
    methods = [
        None,
        first_block(threshold=0.2, level=level),
        first_block(threshold=0.1, order=1, level=level),
        teacache("any", threshold=0.3, coefficients=(1.0, 0.0), level=level),
        taylorseer(warmup=2, interval=3, level=level),
    ]
    alone, decided = [], []
    for seed, method in enumerate(methods):
        row = open_row(name, seed, 9, method, pools)
        alone += finish(model, [row])
        decided.append(method and decisions(row))
    rows = [open_row(name, seed, 9, method, pools) for seed, method in enumerate(methods)]
    for ours, expected in zip(finish(model, rows), alone, strict=True):
        assert close(ours, expected)
    assert [method and decisions(row) for row, method in zip(rows, methods, strict=True)] == decided
    assert sum(skipped for _, skipped in filter(None, decided)) > 0
    assert pools.num_used == 0


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("QwenImageTransformer2DModel", "encoder_hidden_states"),
        ("ZImageTransformer2DModel", "cap_feats"),
    ],
)
def test_prompts_of_any_length_share_a_run(name: str, argument: str) -> None:
    model, batch = open_model(build(name)), batch_of(name)
    ragged = [
        replace(given, rows={argument: given.rows[argument][: 5 - 2 * row]})
        for row, given in enumerate(batch.conditioning)
    ]
    shape = batch.samples.shape[1:]
    keys = {model.batch_key(shape, given) for given in ragged}
    assert len(keys) == 1
    assert len({model.batch_key(shape, given, is_exact=True) for given in ragged}) == 3
    mixed = replace(batch, conditioning=ragged)
    together = model.velocity(mixed)
    for row in range(3):
        assert close(model.velocity(mixed.select([row])), together[[row]])


def test_edited_latents_are_cut_from_the_output() -> None:
    module = build("SanaTransformer2DModel")
    seen: list[tuple[int, ...]] = []

    def answer(**arguments: Any) -> tuple[Tensor]:
        seen.append(tuple(arguments["hidden_states"].shape))
        return (arguments["hidden_states"] * 2,)

    module.forward = answer
    model = DenoiseModel(module, DenoiserFamily())
    conditioning = conditioning_of("SanaTransformer2DModel", 1)
    edited = type(conditioning)(rows={}, context=torch.ones(3, 8, 8))
    batch = Batch(samples=torch.ones(1, 4, 8, 8), times=torch.tensor([1.0]), conditioning=[edited])
    assert model.velocity(batch).shape == (1, 4, 8, 8)
    assert seen == [(1, 7, 8, 8)]


def test_models_that_cannot_be_run_in_parts_say_so() -> None:
    module = build("UNet2DConditionModel")
    with pytest.raises(
        WeightsError, match="UNet2DConditionModel has no list of blocks named blocks"
    ):
        SpanModel(module, DenoiserFamily(span=(Blocks("blocks"),)))
    with pytest.raises(WeightsError, match="Unknown denoising model Linear"):
        family_of(torch.nn.Linear(1, 1))


def test_views_leave_the_model_as_it_was() -> None:
    module = build("FluxTransformer2DModel")
    names = [name for name, _ in module.named_modules()]
    blocks = list(module.transformer_blocks)  # type: ignore[arg-type]
    model = open_model(module)
    model.velocity(batch_of("FluxTransformer2DModel"))
    assert [name for name, _ in module.named_modules()] == names
    assert all(a is b for a, b in zip(module.transformer_blocks, blocks, strict=True))  # type: ignore[arg-type]
    assert "kwargs" not in inspect.signature(module.forward).parameters

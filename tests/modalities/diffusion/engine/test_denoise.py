"""The loop: guidance, previews, rows that come, go and differ, and nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.denoiser_stubs import NATIVE_CONFIGS, noise
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, planned, taylorseer
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import (
    DenoiseRow,
    GuidanceBranch,
    Inpainting,
)
from triptych.modalities.diffusion.engine.families.model import (
    Conditioning,
    DenoiseModel,
    DenoiserFamily,
)
from triptych.modalities.diffusion.engine.guidance import Guidance, NormRule
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import clean_samples, start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools


class Toy(nn.Module):
    """Answers by sample, time and prompt, each row by itself; remembers how it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.batches: list[int] = []

    def forward(self, hidden_states: Tensor, timestep: Tensor, prompt: Tensor, **_: Any) -> Any:
        self.batches.append(len(hidden_states))
        shift = (prompt + timestep / 1000).view(-1, *[1] * (hidden_states.ndim - 1))
        return (torch.tanh(self.gain * hidden_states + shift),)


def open_row(
    pools: TensorPools,
    *,
    seed: int = 1,
    num_steps: int = 6,
    prompts: Sequence[float] = (0.3,),
    shape: Sequence[int] = (2, 3),
    cache: CacheMethod | None = None,
    config: str = "flow euler",
    **guidance: Any,
) -> DenoiseRow:
    sample = start_row(
        noise(seed, shape),
        NATIVE_CONFIGS[config],
        Spacing(num_steps=num_steps),
        generator=torch.Generator().manual_seed(seed),
        pools=pools,
    )
    branches = [
        GuidanceBranch(
            conditioning=Conditioning(rows={"prompt": torch.tensor(prompt)}),
            cache=RowCache(cache, num_steps, pools) if cache else None,
        )
        for prompt in prompts
    ]
    return DenoiseRow(sample=sample, branches=branches, guidance=Guidance(**guidance))


def denoiser() -> tuple[Denoiser, Toy]:
    toy = Toy()
    return Denoiser(DenoiseModel(toy, DenoiserFamily())), toy


def finish(loop: Denoiser, row: DenoiseRow) -> Tensor:
    while not row.is_done:
        loop.step([row])
    sample = row.sample.sample
    row.release()
    return sample


def velocity_at(row: DenoiseRow, prompt: float) -> Tensor:
    time = torch.tensor([row.sample.timesteps[row.sample.step]])
    answer: Tensor = Toy()(row.sample.sample[None], time, torch.tensor([prompt]))[0][0].detach()
    return answer


def test_guidance_weighs_two_branches_in_one_run() -> None:
    loop, toy = denoiser()
    row = open_row(TensorPools(), prompts=(0.3, -0.2), scale=4.0)
    before, (sigma, after) = row.sample.sample, row.sample.noise_levels[:2]
    wanted, unwanted = velocity_at(row, 0.3), velocity_at(row, -0.2)
    loop.step([row])
    expected = before + (after - sigma) * (unwanted + 4 * (wanted - unwanted))
    assert torch.allclose(row.sample.sample, expected, atol=1e-6)
    assert toy.batches == [2]


@pytest.mark.parametrize("config", ["flow euler", "flow heun", "euler"])
def test_a_branch_asked_ahead_changes_no_step_and_is_asked_once(config: str) -> None:
    loop, toy = denoiser()
    pools = TensorPools()
    guided = {"num_steps": 4, "prompts": (0.3, -0.2), "scale": 4.0, "config": config}
    expected = finish(loop, open_row(pools, **guided))
    shared, single = open_row(pools, **guided), open_row(pools, **guided)
    for _ in range(shared.num_steps):
        toy.batches.clear()
        loop.evaluate_ahead([shared], [0])
        loop.evaluate_ahead([shared], [0])  # as after a plan that failed
        assert toy.batches == [1]
        loop.step([shared, single])
        assert toy.batches == [1, 3]
    assert [branch.num_runs for branch in shared.branches] == [shared.num_steps] * 2
    for row in (shared, single):
        assert torch.allclose(row.sample.sample, expected, atol=1e-6)


def test_guidance_can_keep_the_norm() -> None:
    loop, toy = denoiser()
    row = open_row(TensorPools(), num_steps=4, prompts=(0.3, -0.2), scale=5.0, norm=NormRule.KEEP)
    before, (sigma, after) = row.sample.sample, row.sample.noise_levels[:2]
    wanted, unwanted = velocity_at(row, 0.3), velocity_at(row, -0.2)
    loop.step([row])
    guided = unwanted + 5 * (wanted - unwanted)
    guided *= wanted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
    assert torch.allclose(row.sample.sample, before + (after - sigma) * guided, atol=1e-6)
    finish(loop, row)
    assert toy.batches == [2] * 4


def test_previews_approximate_the_result_without_extra_runs() -> None:
    loop, toy = denoiser()
    pools = TensorPools()
    rows = [open_row(pools, seed=seed, shape=(2, 2 + seed)) for seed in (1, 2)]
    plain = [finish(loop, open_row(pools, seed=seed, shape=(2, 2 + seed))) for seed in (1, 2)]
    toy.batches.clear()
    apart: list[float] = []

    def on_velocities(members: list[DenoiseRow], velocities: Tensor) -> None:
        if members == rows[:1]:
            (clean,) = clean_samples([row.sample for row in members], velocities)
            apart.append(float((clean - plain[0]).norm()))

    while not rows[0].is_done:
        loop.step(rows, on_velocities)
    assert toy.batches == [1, 1] * 6  # two shapes, six steps
    assert apart[-1] < 1e-5
    assert apart == sorted(apart, reverse=True)
    assert all(torch.equal(row.sample.sample, end) for row, end in zip(rows, plain, strict=True))


PLANS = [
    [True, False, False, True, False, True],
    [True, True, False, False, False, True],
    [True, False, True, False, False, True],
]


def runs_of(foreseen: Sequence[int]) -> list[int]:
    """How many steps lead to each computed one, itself included."""
    computed = [step for step, num_rows in enumerate(foreseen) if num_rows]
    return [after - before for before, after in pairwise([-1, *computed])]


@pytest.mark.parametrize("config", ["flow euler", "dpm++ 3m", "unipc", "euler ancestral"])
def test_rows_with_different_plans_meet_at_their_computed_steps(config: str) -> None:
    """Whether they leap or skip step by step: with fresh noise, or what an edit keeps."""
    loop, toy = denoiser()
    pools = TensorPools()

    def begin() -> list[DenoiseRow]:
        rows = [
            open_row(
                pools,
                seed=index,
                config=config,
                cache=planned(plan, order=index),
                prompts=(0.3, -0.2),
                scale=3.0,
                norm=NormRule.KEEP if index == 2 else NormRule.NONE,
            )
            for index, plan in enumerate(PLANS)
        ]
        rows[0].inpainting = Inpainting(
            clean=noise(7, (2, 3)), mask=torch.full((2, 3), 0.5), noise=noise(8, (2, 3))
        )
        return [*rows, open_row(pools, seed=9, config=config, cache=planned(PLANS[0]))]

    alone = [finish(loop, row) for row in begin()]
    toy.batches.clear()
    rows = begin()
    for counts in zip(*[runs_of(row.planned_runs()) for row in rows], strict=True):
        loop.advance(rows, counts)
    assert toy.batches == [7, 7, 7]
    for row, expected in zip(rows, alone, strict=True):
        assert row.is_done
        assert torch.allclose(row.sample.sample, expected, atol=1e-5)
        slots = [branch.cache for branch in row.branches if branch.cache]
        assert slots[0].decisions.num_computed == 3
        assert slots[0].decisions.num_skipped == 3
        row.release()
    assert pools.num_used == 0


def test_what_is_kept_of_an_edited_image_stays_and_is_as_noisy_as_the_rest() -> None:
    loop, _ = denoiser()
    clean, start = noise(7, (2, 3)), noise(1, (2, 3))
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.5]])
    pools = TensorPools()
    row, plain = open_row(pools), open_row(pools)
    row.inpainting = Inpainting(clean=clean, mask=mask, noise=start)
    loop.step([row, plain])
    level = row.sample.noise_levels[1]
    before = (1 - level) * clean + level * start
    expected = torch.lerp(before, plain.sample.sample, mask)
    assert torch.allclose(row.sample.sample, expected, atol=1e-6)
    end = finish(loop, row)
    assert torch.equal(end[mask == 0], clean[mask == 0])
    assert not torch.allclose(end[mask == 1], clean[mask == 1], atol=0.1)


def test_joining_waits_for_no_one() -> None:
    loop, toy = denoiser()
    pools = TensorPools()
    first, second = open_row(pools, seed=1, num_steps=8), open_row(pools, seed=2, num_steps=3)
    loop.step([first])
    loop.step([first, second])
    assert (first.sample.step, second.sample.step) == (2, 1)
    assert toy.batches == [1, 2]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=50, max_size=50))
def test_nothing_leaks_and_no_row_notices_the_others(choices: list[int]) -> None:
    """A thousand events over the examples: rows join, step, are aborted, differ in all there is."""
    loop, _ = denoiser()
    pools = TensorPools()
    alone: dict[tuple[Any, ...], Tensor] = {}
    live: list[tuple[tuple[Any, ...], DenoiseRow]] = []

    def make(key: tuple[Any, ...]) -> DenoiseRow:
        seed, num_steps, width, cached, guided = key
        return open_row(
            pools,
            seed=seed,
            num_steps=num_steps,
            prompts=(0.3, -0.2) if guided else (0.1 * seed,),
            shape=(2, width),
            cache=taylorseer(interval=3, warmup=2) if cached else None,
            scale=3.0,
        )

    for choice in choices:
        action, rest = choice % 4, choice // 4
        if action == 0 or not live:
            key = (rest % 3, 3 + rest % 5, 2 + rest % 2, rest % 7 > 3, rest % 11 > 5)
            if key not in alone:
                alone[key] = finish(loop, make(key))
            live.append((key, make(key)))
        elif action == 1:
            live.pop(rest % len(live))[1].release()
        else:
            loop.step([row for index, (_, row) in enumerate(live) if (rest >> index) % 2 == 0])
        for key, row in [pair for pair in live if pair[1].is_done]:
            assert torch.allclose(row.sample.sample, alone[key], atol=1e-6)
            row.release()
        live = [pair for pair in live if not pair[1].is_done]
    for _, row in live:
        row.release()
    assert pools.num_used == 0


def test_a_finished_row_cannot_be_stepped() -> None:
    loop, _ = denoiser()
    row = open_row(TensorPools(), num_steps=1)
    loop.step([row])
    with pytest.raises((AssertionError, IndexError)):
        loop.step([row])

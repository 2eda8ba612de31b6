"""Slots: decisions and predictions of a row alone, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.denoiser_stubs import NATIVE_CONFIGS, begin, cached_step, denoiser, model_inputs
from triptych.modalities.diffusion.engine.caches.decisions import (
    FirstBlockGate,
    GateSignal,
    IntervalGate,
)
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences, Point
from triptych.modalities.diffusion.engine.caches.methods import (
    Bounds,
    CacheMethod,
    Level,
    first_block,
    magcache,
    planned,
    taylorseer,
    teacache,
)
from triptych.modalities.diffusion.engine.caches.row_cache import (
    RowCache,
    distances,
    keep_signals,
    predict,
    record,
)
from triptych.modalities.diffusion.engine.samplers.rows import SampleRow, release_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

STEPS = 12
METHODS = {
    "first block": first_block(threshold=0.3),
    "first block, order 1": first_block(threshold=0.3, order=1),
    "teacache": teacache("any", threshold=0.5, coefficients=(1.0, 0.0)),
    "taylorseer 1": taylorseer(warmup=3),
    "taylorseer 2 by step": taylorseer(warmup=3, order=2, by_step=True),
    "magcache": magcache((1.0, 0.99, 1.01, 0.98), retention=0.1),
    "planned 2": planned([step in {0, 1, 4, 8, 11} for step in range(STEPS)], order=2),
}
Pair = tuple[SampleRow, RowCache]


def open_pair(method: CacheMethod, seed: int, pools: TensorPools) -> Pair:
    row = begin(NATIVE_CONFIGS["flow euler"], STEPS, seed, pools)
    return row, RowCache(method, STEPS, pools)


def signals_of(rows: list[Pair]) -> torch.Tensor:
    """As a first block's residual would, they follow the sample."""
    return model_inputs([row for row, _ in rows]).tanh()


def run_alone(pair: Pair) -> list[bool]:
    decisions = []
    while not pair[0].is_done:
        decisions += cached_step([pair], denoiser, signals_of([pair]))
    return decisions


@settings(max_examples=20, deadline=None)
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(sorted(METHODS)), st.integers(0, 50)), min_size=2, max_size=5
    ),
    order=st.randoms(use_true_random=False),
)
def test_a_row_decides_and_ends_the_same_alone_and_batched(
    chosen: list[tuple[str, int]], order: Any
) -> None:
    pools = TensorPools()
    alone = []
    for name, seed in chosen:
        pair = open_pair(METHODS[name], seed, pools)
        alone.append((run_alone(pair), pair[0].sample))
        release_row(pair[0])
        pair[1].release()
    assert pools.num_used == 0
    together = [open_pair(METHODS[name], seed, pools) for name, seed in chosen]
    decisions: list[list[bool]] = [[] for _ in chosen]
    while active := [i for i, (row, _) in enumerate(together) if not row.is_done]:
        batch = order.sample(active, order.randint(1, len(active)))
        # References are compared within a batch of one kind, as a family's probe gives them.
        rows = [together[index] for index in batch]
        for index, computes in zip(
            batch, cached_step(rows, denoiser, signals_of(rows)), strict=True
        ):
            decisions[index].append(computes)
    for (row, slot), decided, (expected, sample) in zip(together, decisions, alone, strict=True):
        assert decided == expected
        assert torch.allclose(row.sample, sample, atol=1e-6)
        assert decided[0]
        assert decided[-1]
        assert (slot.decisions.num_computed, slot.decisions.num_skipped) == (
            sum(decided),
            STEPS - sum(decided),
        )
        release_row(row)
        slot.release()
    assert pools.num_used == 0


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_rule_skips_and_none_forever(name: str) -> None:
    decisions = run_alone(open_pair(METHODS[name], 1, TensorPools()))
    assert 0 < sum(decisions) < STEPS


def test_skips_are_bounded_and_the_ends_compute() -> None:
    method = CacheMethod(
        open_gate=lambda num_steps: FirstBlockGate(threshold=1e9),
        extrapolator=DividedDifferences(),
        level=Level.VELOCITY,
        bounds=Bounds(max_skips=3),
    )
    decisions = run_alone(open_pair(method, 1, TensorPools()))
    assert [step for step, computes in enumerate(decisions) if computes] == [0, 4, 8, 11]
    unforced = CacheMethod(
        open_gate=lambda num_steps: IntervalGate(5, 4),
        extrapolator=DividedDifferences(1),
        level=Level.VELOCITY,
        bounds=Bounds(forces_last=False),
    )
    decisions = run_alone(open_pair(unforced, 1, TensorPools()))
    assert [step for step, computes in enumerate(decisions) if computes] == [0, 1, 2, 3, 5, 10]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_predicted_decisions_come_true(name: str) -> None:
    row, slot = open_pair(METHODS[name], 1, TensorPools())
    foreseen = slot.may_compute(range(STEPS))
    decided = run_alone((row, slot))
    if name in {"first block", "first block, order 1", "teacache", "magcache"}:
        assert all(foreseen)  # distances decide, or what surrounds the blocks runs at every step
    else:
        assert decided == foreseen
    if name == "planned 2":
        assert [step for step, computes in enumerate(decided) if computes] == [0, 1, 4, 8, 11]


def test_magcache_of_whole_answers_is_foreseen_too() -> None:
    method = magcache((1.0, 0.99, 1.01, 0.98), retention=0.1, level=Level.VELOCITY)
    row, slot = open_pair(method, 1, TensorPools())
    foreseen = slot.may_compute(range(STEPS))
    assert run_alone((row, slot)) == foreseen
    assert not all(foreseen)


def test_a_step_taken_again_counts_once() -> None:
    pools = TensorPools()
    slot = RowCache(METHODS["taylorseer 1"], STEPS, pools)
    for step in range(3):
        for _ in range(2):
            assert slot.decisions.decide(step)
            record([slot], torch.full((1, 2), float(step)), [Point(step, 1 - step / 9)])
    assert slot.decisions.num_computed == 3
    assert [point.step for point in slot.known().points] == [2, 1]
    assert pools.num_used == 2
    slot.release()
    assert pools.num_used == 0
    assert slot.decisions.is_forced(7)


def test_teacache_compares_with_the_step_before_and_fbcache_with_the_last_computed() -> None:
    pools = TensorPools()
    points = [Point(step, 1 - step / 9) for step in range(3)]
    for name, expected in (("teacache", 1 / 2), ("first block", 2.0)):
        slot = RowCache(METHODS[name], STEPS, pools)
        for value, point, computes in zip((1.0, 2.0), points, (True, False), strict=False):
            keep_signals([slot], torch.full((1, 4), value), [point], [computes])
        assert distances([slot], torch.full((1, 4), 3.0)) == pytest.approx([expected])
        assert slot.signal in {GateSignal.MODULATED_INPUT, GateSignal.FIRST_RESIDUAL}
        slot.release()


def test_rows_with_histories_of_different_length_predict_together() -> None:
    pools = TensorPools()
    points = [Point(0, 1.0), Point(1, 0.9), Point(2, 0.8)]
    young, old = (RowCache(METHODS["planned 2"], STEPS, pools) for _ in range(2))
    for point in points:
        record([old], torch.full((1, 2), point.level**2), [point])
    record([young], torch.full((1, 2), 7.0), points[:1])
    predicted = predict([young, old], [Point(3, 0.5)] * 2)
    assert predicted[:, 0].tolist() == pytest.approx([7.0, 0.25], rel=1e-4)

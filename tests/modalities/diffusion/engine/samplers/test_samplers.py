"""Samplers by their properties: whatever the formulas, these must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.denoiser_stubs import (
    FOREIGN_CONFIGS,
    NATIVE_CONFIGS,
    begin,
    denoiser,
    finish,
    noise,
    step,
)
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.diffusion.engine.samplers.registry import (
    Spacing,
    build_program,
    open_scheduler,
)
from triptych.modalities.diffusion.engine.samplers.rows import (
    clean_samples,
    model_inputs,
    release_row,
)
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

NAMES = [*NATIVE_CONFIGS, *FOREIGN_CONFIGS]
CONFIGS = {**NATIVE_CONFIGS, **FOREIGN_CONFIGS}
IS_RANDOM = {"flow euler stochastic", "euler ancestral", "lcm", "dpm++ 2m sde", "dpm++ 3m sde"}
FLOWS = ["flow euler", "flow heun", "dpm++ 2m flow", "unipc flow"]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(1, 9), st.integers(0, 99)),
        min_size=2,
        max_size=6,
    ),
    order=st.randoms(use_true_random=False),
)
def test_the_samples_of_a_row_are_the_same_alone_and_in_any_batch(
    rows: list[tuple[str, int, int]], order: Any
) -> None:
    pools = TensorPools()
    alone = [finish(begin(CONFIGS[name], steps, seed, pools)) for name, steps, seed in rows]
    together = [begin(CONFIGS[name], steps, seed, pools) for name, steps, seed in rows]
    while active := [row for row in together if not row.is_done]:
        step(order.sample(active, order.randint(1, len(active))))
    for row, sample in zip(together, alone, strict=True):
        assert torch.equal(row.sample, sample)
        release_row(row)
    assert pools.num_used == 0


@pytest.mark.parametrize("name", FLOWS)
def test_a_true_velocity_leads_to_the_clean_sample(name: str) -> None:
    clean, start = noise(1), noise(2)
    row = begin(NATIVE_CONFIGS[name], 12, 2, TensorPools())

    def truth(samples: Tensor, times: Tensor) -> Tensor:
        return (start - clean)[None]

    assert torch.allclose(clean_samples([row], truth(start, start)), clean, atol=1e-2)
    assert torch.allclose(finish(row, truth), clean, atol=1e-2)


@pytest.mark.parametrize("name", sorted(set(NATIVE_CONFIGS) - IS_RANDOM))
def test_influence_is_the_derivative_of_the_image(name: str) -> None:
    program = build_program(open_scheduler(NATIVE_CONFIGS[name], Spacing(num_steps=7)))
    assert program is not None

    def final(outputs: Any) -> float:
        state = np.zeros(program.num_states)
        state[0] = 1.0
        for index, output in enumerate(outputs):
            state = program.weights_NSC[index] @ np.concatenate([state, [output, 0.0]])
        return float(state[0])

    outputs = np.linspace(-1, 1, len(program))
    for index in range(len(program)):
        nudged = outputs.copy()
        nudged[index] += 1.0
        assert final(nudged) - final(outputs) == pytest.approx(program.influence[index], abs=1e-9)


@pytest.mark.parametrize("name", ["euler", "euler velocity", "ddim", "dpm++ 2m", "unipc", "lcm"])
def test_clean_sample_is_available_at_every_step(name: str) -> None:
    row = begin(NATIVE_CONFIGS[name], 6, 3, TensorPools())
    while not row.is_done:
        output = denoiser(model_inputs([row]), torch.tensor([row.timesteps[row.step]]))
        predicted = clean_samples([row], output)
        if row.step == len(row.timesteps) - 1:
            last = predicted
        step([row])
    # The last step of each goes all the way, so what it foretells is what comes.
    assert torch.allclose(last[0], row.sample, atol=2e-2 * float(row.sample.abs().max()))


def test_noise_depends_on_the_rows_own_generator_alone() -> None:
    pools = TensorPools()
    config = NATIVE_CONFIGS["euler ancestral"]
    first, second = (finish(begin(config, 6, 7, pools)) for _ in range(2))
    other = finish(begin(config, 6, 8, pools))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other, atol=0.1)


def test_a_row_never_sees_what_another_left_in_its_cells() -> None:
    pools = TensorPools()
    config = NATIVE_CONFIGS["unipc"]
    expected = finish(begin(config, 5, 1, pools))
    broken = begin(config, 5, 2, pools)
    step([broken], lambda samples, times: torch.full_like(samples, torch.nan))
    release_row(broken)
    assert torch.equal(finish(begin(config, 5, 1, pools)), expected)


def test_mistakes_are_named() -> None:
    with pytest.raises(WeightsError, match="NoSuchScheduler"):
        open_scheduler({"_class_name": "NoSuchScheduler"}, Spacing(num_steps=4))
    with pytest.raises(WeightsError, match="FluxPipeline"):
        open_scheduler({"_class_name": "FluxPipeline"}, Spacing(num_steps=4))
    with pytest.raises(InvalidRequest, match="5000 steps"):
        open_scheduler(NATIVE_CONFIGS["ddim"], Spacing(num_steps=5000))
    stretched = {**NATIVE_CONFIGS["flow euler"], "shift_terminal": 0.02}
    with pytest.raises(InvalidRequest, match="1 steps"):
        open_scheduler(stretched, Spacing(num_steps=1))

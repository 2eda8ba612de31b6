"""Rows between noise and image, advanced together with any samplers and steps.

Owns a row's latents, its sampler's history, its step and its noise. Knows no model.

Legend: R rows, S states of a program (the sample first).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.diffusion.engine.samplers.program import Program
from triptych.modalities.diffusion.engine.samplers.registry import (
    Spacing,
    build_program,
    open_scheduler,
)
from triptych.modalities.diffusion.engine.tensor_pool import (
    TensorPool,
    TensorPools,
    Weights,
    select_rows,
    weighted_sum,
)


@dataclass(eq=False, kw_only=True)
class SampleRow:
    """One image being generated. `release_row` must be called once, however it ends.

    `step` counts model evaluations done. Exactly one of `program` and `foreign` (a scheduler object
    of diffusers for this row) defines the steps.
    """

    pool: TensorPool
    cells: tuple[int, ...]
    generator: torch.Generator
    timesteps: Sequence[float]
    noise_levels: Sequence[float]
    program: Program | None = None
    foreign: Any = None
    step: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the sample holds the finished latents."""
        return self.step == len(self.timesteps)

    def time_at(self, step: int) -> float:
        """The scheduler's time at a step; 0 after the last."""
        return self.timesteps[step] if step < len(self.timesteps) else 0.0

    @property
    def sample(self) -> Tensor:
        """The present latents, in float32."""
        return self.pool.read(self.cells[:1])[0]


def start_row(
    latents: Tensor,
    config: Mapping[str, Any],
    spacing: Spacing,
    *,
    generator: torch.Generator,
    pools: TensorPools,
    clean: Tensor | None = None,
) -> SampleRow:
    """A row that begins at `latents` (unit noise, without a batch dimension).

    With `clean`, finished latents, it begins at those, noised for the step `spacing.begin`.
    `config` is the model's scheduler_config.json; `generator` (on the CPU) gives the noise that the
    sampler adds later. Raises as `open_scheduler` does.
    """
    scheduler = open_scheduler(config, spacing)
    begin = spacing.begin * scheduler.order  # some evaluate the model twice per step
    program = build_program(scheduler, begin)
    pool = pools.pool(latents.shape, torch.float32, latents.device)
    cells = pool.take(program.num_states if program else 1)
    row = SampleRow(
        pool=pool,
        cells=cells,
        generator=generator,
        timesteps=(program.timesteps_N if program else scheduler.timesteps).tolist(),
        noise_levels=_levels(program, scheduler),
        program=program,
        foreign=None if program else scheduler,
        step=begin,
    )
    if clean is None:
        scale = program.initial_scale if program else getattr(scheduler, "init_noise_sigma", 1.0)
        pool.write(cells[:1], latents[None] * float(scale))
    else:
        pool.write(cells[:1], noised(row, clean, latents)[None])
    if row.foreign is not None and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    return row


def noised(row: SampleRow, clean: Tensor, noise: Tensor) -> Tensor:
    """A finished sample, noised to the row's present step; unchanged if the row is done."""
    if row.is_done:
        return clean
    if row.program is not None:
        of_clean, of_noise = row.program.noised_N2[row.step]
        return clean * float(of_clean) + noise * float(of_noise)
    scheduler = row.foreign
    add = getattr(scheduler, "add_noise", None) or scheduler.scale_noise
    times = scheduler.timesteps[row.step : row.step + 1]
    result: Tensor = add(clean[None].float(), noise[None].float(), times)[0]
    return result


def overwrite(row: SampleRow, sample: Tensor) -> None:
    """Replace the row's sample."""
    row.pool.write(row.cells[:1], sample[None])


def release_row(row: SampleRow) -> None:
    """Give the row's storage back."""
    row.pool.give_back(row.cells)


def model_inputs(rows: Sequence[SampleRow]) -> Tensor:
    """The model's inputs for rows with latents of one shape: `[R, ...]`, float32."""
    samples = rows[0].pool.read([row.cells[0] for row in rows])
    for index, row in enumerate(rows):
        if hasattr(row.foreign, "scale_model_input"):
            time = row.foreign.timesteps[row.step]
            samples[index] = row.foreign.scale_model_input(samples[index, None], time)[0]
    scales = [float(r.program.input_scales_N[r.step]) if r.program else 1.0 for r in rows]
    if all(scale == 1 for scale in scales):
        return samples
    return weighted_sum([[scale] for scale in scales], [samples])


def advance(rows: Sequence[SampleRow], outputs: Tensor) -> None:
    """Take one step with the model's outputs, `[R, ...]` in the order of the rows.

    The latents must have one shape; samplers and steps may differ. If this raises, each row has
    either taken its step or not begun it.
    """
    outputs = outputs.float()
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        assert not row.is_done, "the row is finished"
        if row.program is None:
            _advance_foreign(row, outputs[index])
        else:
            groups[row.program.num_states].append(index)
    for members in groups.values():
        _advance_programs([rows[index] for index in members], select_rows(outputs, members))


def clean_samples(rows: Sequence[SampleRow], outputs: Tensor) -> Tensor:
    """The finished latents predicted from this step's outputs, for previews, `[R, ...]`.

    Call before `advance`. A row with a foreign sampler gives its present sample.
    """
    weights_R2 = [
        [1.0, 0.0] if row.program is None else row.program.clean_N2[row.step].tolist()
        for row in rows
    ]
    samples = rows[0].pool.read([row.cells[0] for row in rows])
    return weighted_sum(weights_R2, [samples, outputs.float()])


def _advance_programs(rows: Sequence[SampleRow], outputs: Tensor) -> None:
    weights_RSC = [row.program.weights_NSC[row.step].tolist() for row in rows if row.program]
    noisy = [row for row in rows if row.program and row.program.needs_noise(row.step)]
    before = [row.generator.get_state() for row in noisy]
    try:
        noise = _fresh_noise(rows, noisy, outputs) if noisy else outputs  # unused: weight zero
        write_states(rows, weights_RSC, [*read_states(rows), outputs, noise])
    except Exception:  # a repeated step must sample the same noise
        for row, state in zip(noisy, before, strict=True):
            row.generator.set_state(state)
        raise
    for row in rows:
        row.step += 1


def read_states(rows: Sequence[SampleRow]) -> tuple[Tensor, ...]:
    """The states of rows with S states each: S tensors `[R, ...]`."""
    return rows[0].pool.read_columns(list(zip(*[row.cells for row in rows], strict=True)))


def write_states(
    rows: Sequence[SampleRow], weights_RSC: Sequence[Weights], columns: Sequence[Tensor]
) -> None:
    """Set each row's states to weighted sums of the columns: of all rows, or of none."""
    values = [weighted_sum(weights_RC, columns) for weights_RC in zip(*weights_RSC, strict=True)]
    cells = [row.cells[state] for state in range(len(values)) for row in rows]
    rows[0].pool.write(cells, values[0] if len(values) == 1 else torch.cat(values))


def _fresh_noise(rows: Sequence[SampleRow], noisy: Sequence[SampleRow], like: Tensor) -> Tensor:
    """Each row's noise, sampled on the CPU so that every device generates the same image."""
    shape = like.shape[1:]
    noise = [
        torch.randn(shape, generator=row.generator) if row in noisy else torch.zeros(shape)
        for row in rows
    ]
    return to_device(torch.stack(noise), like.device)


def _advance_foreign(row: SampleRow, output: Tensor) -> None:
    takes_noise = "generator" in row.foreign.step.__code__.co_varnames
    extra = {"generator": row.generator} if takes_noise else {}
    sample = row.pool.read(row.cells)
    time = row.foreign.timesteps[row.step]
    result = row.foreign.step(output[None], time, sample, return_dict=False, **extra)
    row.pool.write(row.cells, result[0])
    row.step += 1


def _levels(program: Program | None, scheduler: Any) -> list[float]:
    """The share of noise at each evaluation; by timestep if the levels are unknown."""
    if program is not None:
        return [float(level) for level in program.noise_levels_N]
    span = float(scheduler.config.get("num_train_timesteps", 1000))
    return [float(time) / span for time in scheduler.timesteps]

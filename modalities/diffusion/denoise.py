"""The denoise loop: rows of any sampler, step, guidance and cache, one step at a time.

Owns a picture's row from noise to finished latents. Knows no request, no text and no codec:
`recipes` makes rows of prompts and pictures of latents.

Guidance branches are rows to the model: each has its own conditioning and its own cache, so a
branch may skip while the other computes, and guidance may end before the picture does.

Legend: R pictures, B branches of all pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from triptych.modalities.diffusion.caches.extrapolation import Point
from triptych.modalities.diffusion.caches.methods import Level
from triptych.modalities.diffusion.caches.slot import CacheSlot
from triptych.modalities.diffusion.cells import CellPool, weighted_sum
from triptych.modalities.diffusion.evaluation import evaluate
from triptych.modalities.diffusion.families.family import Conditioning
from triptych.modalities.diffusion.families.model import Batch, DenoiseModel
from triptych.modalities.diffusion.samplers.rows import (
    SampleRow,
    advance,
    clean_samples,
    model_inputs,
    noised,
    overwrite,
    release_row,
)


@dataclass(eq=False, slots=True, kw_only=True)
class Branch:
    """One side of guidance: what it is told, and its cache."""

    conditioning: Conditioning
    slot: CacheSlot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """How two branches become one: `scale` times the first less `scale` - 1 times the second.

    `start` and `stop` are shares of the steps outside which the first branch stands alone.
    `keeps_norm`: the result gets back the first branch's norm over the last axis, which a large
    scale would inflate (Qwen-Image, Lumina 2).
    """

    scale: float = 1.0
    keeps_norm: bool = False
    start: float = 0.0
    stop: float = 1.0

    def holds_at(self, step: int, num_steps: int) -> bool:
        """Whether the second branch is asked at this step."""
        return self.start <= step / num_steps < self.stop


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Kept:
    """What must stay of a picture that is edited: its latents, where, and the noise they began in.

    `mask` is 1 where the row draws and 0 where `clean` stays. All are of the sample's shape.
    """

    clean: Tensor
    mask: Tensor
    noise: Tensor


@dataclass(eq=False, kw_only=True)
class Row:
    """A picture being drawn. `release` once, however it ends.

    `branches`: the prompt's, then the negative prompt's where there is guidance.
    """

    sample: SampleRow
    branches: list[Branch]
    guidance: Guidance = field(default_factory=Guidance)
    kept: Kept | None = None

    @property
    def is_done(self) -> bool:
        """Whether the latents are finished."""
        return self.sample.is_done

    @property
    def point(self) -> Point:
        """Where on its way the row stands."""
        step = self.sample.step
        return Point(step, self.sample.noise_levels[step])

    @property
    def active(self) -> list[Branch]:
        """The branches asked at this step."""
        if len(self.branches) == 1:
            return self.branches
        holds = self.guidance.holds_at(self.sample.step, len(self.sample.timesteps))
        return self.branches if holds else self.branches[:1]

    @property
    def is_free(self) -> bool:
        """Whether the coming step is known to need no run of the model."""
        return not self.is_done and all(
            branch.slot is not None
            and branch.slot.method.level is Level.VELOCITY
            and branch.slot.skips_for_certain(self.sample.step)
            for branch in self.active
        )

    def release(self) -> None:
        """Give back everything the row holds."""
        release_row(self.sample)
        for branch in self.branches:
            if branch.slot is not None:
                branch.slot.release()


# Rows of one shape, and their velocities after guidance, `[R, ...]`.
Watch = Callable[[list[Row], Tensor], None]


class Denoiser:
    """Steps rows through one model. All state is the rows', which share one `CellPools`."""

    def __init__(self, model: DenoiseModel) -> None:
        self.model = model

    @torch.no_grad()
    def step(self, rows: Sequence[Row], watch: Watch | None = None) -> None:
        """One step of each row. None may be done. `watch` is told before the step is taken."""
        for members, velocities in self._guided(rows):
            if watch is not None:
                watch(members, velocities)
            advance([row.sample for row in members], velocities)
            for row in members:
                if row.kept is not None:
                    _restore(row.sample, row.kept)

    def preview_step(self, rows: Sequence[Row]) -> list[Tensor]:
        """Like `step`; and the finished latents as each row's step foretells them, in order."""
        previews: dict[int, Tensor] = {}

        def foretell(members: list[Row], velocities: Tensor) -> None:
            cleans = clean_samples([row.sample for row in members], velocities)
            previews.update({id(row): clean for row, clean in zip(members, cleans, strict=True)})

        self.step(rows, foretell)
        return [previews[id(row)] for row in rows]

    def step_to_run(self, rows: Sequence[Row]) -> None:
        """Take the steps that need no run of the model, then one that does.

        So rows whose plans differ meet at their computed steps, and a run is as full as can be.
        """
        while free := [row for row in rows if row.is_free]:
            self.step(free)
        if running := [row for row in rows if not row.is_done]:
            self.step(running)

    def _guided(self, rows: Sequence[Row]) -> list[tuple[list[Row], Tensor]]:
        """The rows by shape of latents, with what guidance made of their branches' velocities."""
        groups: defaultdict[CellPool, list[Row]] = defaultdict(list)
        for row in rows:
            groups[row.sample.pool].append(row)
        return [(members, self._guide(members)) for members in groups.values()]

    def _guide(self, rows: list[Row]) -> Tensor:
        """Velocities of rows of one shape, `[R, ...]`."""
        asked = [(index, branch) for index, row in enumerate(rows) for branch in row.active]
        velocities_B = self._ask(rows, asked)
        of_row = [index for index, _ in asked]
        prompted = velocities_B[[of_row.index(index) for index in range(len(rows))]]
        guided = [index for index in range(len(rows)) if of_row.count(index) == 2]
        if guided:
            negative = velocities_B[[of_row.index(index) + 1 for index in guided]]
            guidances = [rows[index].guidance for index in guided]
            prompted[guided] = _guide(guidances, prompted[guided], negative)
        return prompted

    def _ask(self, rows: list[Row], asked: list[tuple[int, Branch]]) -> Tensor:
        """Velocities of branches, `[B, ...]`, in one run for each group that can share one."""
        inputs_R = model_inputs([row.sample for row in rows])
        points = [row.point for row in rows]
        times_R = torch.tensor([row.sample.timesteps[row.sample.step] for row in rows])
        velocities = torch.empty((len(asked), *inputs_R.shape[1:]), device=inputs_R.device)
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, (_, branch) in enumerate(asked):
            slot = branch.slot
            key = self.model.batch_key(
                inputs_R.shape[1:],
                branch.conditioning,
                is_exact=slot is not None and slot.keeps_hidden,
            )
            groups[key].append(index)
        for members in groups.values():
            of_row = [asked[index][0] for index in members]
            batch = Batch(
                samples=inputs_R[of_row],
                times=times_R[of_row],
                conditioning=[asked[index][1].conditioning for index in members],
            )
            slots = [asked[index][1].slot for index in members]
            velocities[members] = evaluate(self.model, batch, slots, [points[r] for r in of_row])
        return velocities


def _restore(sample: SampleRow, kept: Kept) -> None:
    """Put back what an edit must not change, as noisy as the rest is now."""
    before = noised(sample, kept.clean, kept.noise)
    overwrite(sample, torch.lerp(before, sample.sample, kept.mask))


def _guide(guidances: Sequence[Guidance], prompted: Tensor, negative: Tensor) -> Tensor:
    scales = np.array([[guidance.scale, 1 - guidance.scale] for guidance in guidances])
    guided = weighted_sum(scales, [prompted, negative])
    keeps = [index for index, guidance in enumerate(guidances) if guidance.keeps_norm]
    if keeps:
        norm = guided[keeps].norm(dim=-1, keepdim=True)
        guided[keeps] *= prompted[keeps].norm(dim=-1, keepdim=True) / norm
    return guided

"""A third party's trained network through our sampler and step caches.

    python samples/benchmarks/consistency_terrain.py --folder FOLDER

`adaptive-terrain-diffusion` 0.4.2 from the package index (MIT): a U-Net of 10.5 M parameters in
ONNX, distilled to generate height maps of 128 x 128 in one step. The denoiser runs it like any
other model whose blocks cannot be run separately.

- The effect of more steps on its maps: their roughness (mean difference of neighbours), and their
  distance from maps of one step. Only if they stay smooth can a cache save anything.
- The quality of a plan and of TaylorSeer at half of the computed steps.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from step_caches.measures import psnr_db
from torch import Tensor, nn

from triptych.core.weights.packages import Package, fetch_file
from triptych.core.weights.progress import RichProgress
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, planned, taylorseer
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.calibration.measuring import calibrate, error_model
from triptych.modalities.diffusion.engine.calibration.planning import all_plans
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import (
    Conditioning,
    DenoiseModel,
    DenoiserFamily,
)
from triptych.modalities.diffusion.engine.samplers.program import Columns, Program
from triptych.modalities.diffusion.engine.samplers.rows import SampleRow
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

TERRAIN = Package(
    name="adaptive-terrain-diffusion",
    version="0.4.2",
    member="terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
    wheel_sha256="dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d",
)
SIDE = 128
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0
"""Of its training, and the spacing of Karras et al. 2022."""


class TerrainNetwork(nn.Module):
    """The ONNX graph: noisy maps, their noise and difficulty to clean maps."""

    def __init__(self, path: Path, num_threads: int) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        self._session = onnxruntime.InferenceSession(path, options)
        self.register_parameter("placeholder", nn.Parameter(torch.zeros(1), requires_grad=False))

    def forward(self, *, return_dict: bool, **inputs: Tensor) -> tuple[Tensor]:
        """The clean maps `[R, 1, 128, 128]`."""
        feeds = {name: value.numpy() for name, value in inputs.items()}
        (clean,) = self._session.run(["denoised"], feeds)
        return (torch.from_numpy(clean),)


def euler(num_steps: int) -> Program:
    """Straight towards the clean map, from level to level; the last step ends there."""
    columns = Columns(0)
    ramp = np.linspace(0, 1, num_steps) if num_steps > 1 else np.zeros(1)
    high, low = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
    sigmas = (high + ramp * (low - high)) ** RHO
    steps = []
    for here, after in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        clean = columns.output
        steps.append(columns.matrix(clean + (after / here) * (columns.sample - clean)))
    return Program(
        timesteps_N=sigmas,
        noise_levels_N=sigmas / (1 + sigmas),
        input_scales_N=np.ones(num_steps),
        weights_NSC=np.stack(steps),
        noised_N2=np.stack([np.ones(num_steps), sigmas], axis=1),
        clean_N2=np.tile([0.0, 1.0], (num_steps, 1)),
        initial_scale=SIGMA_MAX,
    )


class Terrain:
    """Generates maps, all of a call together."""

    def __init__(self, path: Path, num_maps: int, num_threads: int) -> None:
        family = DenoiserFamily(sample="noisy", time="sigma")
        self.denoiser = Denoiser(DenoiseModel(TerrainNetwork(path, num_threads), family))
        self.pools = TensorPools()
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(num_maps, 1, SIDE, SIDE, generator=generator)
        self._difficulties = torch.linspace(0.1, 1, num_maps)

    def rows(self, stack: ExitStack, num_steps: int, cache: CacheMethod | None) -> list[DenoiseRow]:
        """Rows at their first step, which `stack` releases."""
        rows = []
        for noise, difficulty in zip(self._noise, self._difficulties, strict=True):
            row = self._row(noise, difficulty, euler(num_steps), cache)
            stack.callback(row.release)
            rows.append(row)
        return rows

    def generate(self, num_steps: int, cache: CacheMethod | None = None) -> Tensor:
        """Maps in -1..1."""
        with ExitStack() as stack:
            rows = self.rows(stack, num_steps, cache)
            while not rows[0].is_done:
                self.denoiser.step(rows)
            return torch.stack([row.sample.sample for row in rows])

    def plan(self, num_steps: int, num_computed: int) -> CacheMethod:
        """The plan of degree 1 for so many steps."""
        with ExitStack() as stack:
            rows = self.rows(stack, num_steps, None)
            found = error_model(calibrate(self.denoiser, rows, self.pools), rows[0])
        return planned(all_plans(found, DividedDifferences(1), num_computed)[num_computed])

    def _row(
        self, noise: Tensor, difficulty: Tensor, program: Program, cache: CacheMethod | None
    ) -> DenoiseRow:
        pool = self.pools.pool(noise.shape, torch.float32, noise.device)
        sample = SampleRow(
            pool=pool,
            cells=pool.take(program.num_states),
            generator=torch.Generator(),
            timesteps=program.timesteps_N.tolist(),
            noise_levels=program.noise_levels_N.tolist(),
            program=program,
        )
        pool.write(sample.cells, noise[None] * program.initial_scale)
        branch = GuidanceBranch(
            conditioning=Conditioning(rows={"difficulty": difficulty}),
            cache=RowCache(cache, len(program), self.pools) if cache else None,
        )
        return DenoiseRow(sample=sample, branches=[branch])


def roughness(maps: Tensor) -> float:
    """The mean difference of neighbours."""
    return float(maps.diff(dim=-1).abs().mean())


def _in_unit(maps: Tensor) -> Tensor:
    return ((maps + 1) / 2).clamp(0, 1)


@torch.inference_mode()
def measure(terrain: Terrain, steps: Sequence[int]) -> Table:
    """A row for each number of steps."""
    heads = ("steps", "roughness", "PSNR to one step", "half computed: planned", "TaylorSeer")
    table = Table(*heads)
    one = terrain.generate(1)
    for num_steps in steps:
        whole = terrain.generate(num_steps)
        kept = ["", ""]
        if num_steps >= 8:
            caches = (terrain.plan(num_steps, num_steps // 2), taylorseer(interval=2, warmup=1))
            found = [
                psnr_db(_in_unit(terrain.generate(num_steps, c)), _in_unit(whole)) for c in caches
            ]
            kept = [f"{float(np.mean(psnrs)):.1f} dB" for psnrs in found]
        distance = float(np.mean(psnr_db(_in_unit(whole), _in_unit(one))))
        table.add_row(str(num_steps), f"{roughness(whole):.4f}", f"{distance:.1f} dB", *kept)
    return table


def main() -> None:
    """Fetch the network once, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps the network")
    parser.add_argument("--maps", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 14])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    path = args.folder / Path(TERRAIN.member).name
    if not path.exists():
        fetch_file(TERRAIN, args.folder / "fetched", RichProgress()).replace(path)
        shutil.rmtree(args.folder / "fetched")
    Console().print(measure(Terrain(path, args.maps, args.threads), args.steps))


if __name__ == "__main__":
    main()

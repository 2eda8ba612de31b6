"""Loads models onto a GPU that is not there, and takes their steps as the engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.driver import SchedulerDriver
from support.fake_cuda import CUDA, FakeCuda
from triptych.core.config import Config
from triptych.core.devices.device import Device
from triptych.core.errors import TriptychError
from triptych.core.ledger import Ledger
from triptych.core.plan import Plan, StepResult
from triptych.core.weights.resolve import ResolvedModel
from triptych.schedulers.base import LoadedModel, ModelLoader

Open = Callable[[ResolvedModel, Config, Device, Ledger], ModelLoader]


class DryRun(SchedulerDriver):
    """One loaded model: each plan is launched on the fake device and its result is read.

    `peaks` are the bytes that each step held beside what was there before, by kind of plan.
    """

    refusals = ()

    def __init__(self, gpu: FakeCuda, loaded: LoadedModel, ledger: Ledger) -> None:
        super().__init__(loaded.scheduler, loaded.runner, model=loaded.name)
        self.gpu, self.ledger = gpu, ledger
        self.peaks: dict[str, int] = {}
        self.reads: dict[str, list[int]] = {}

    def launch(self, plan: Plan) -> StepResult | TriptychError:
        before = self.gpu.live_bytes
        with self.gpu.launch():
            pending = self.runner.launch(plan)
        held = self.gpu.peak_bytes - before
        self.peaks[plan.kind] = max(self.peaks.get(plan.kind, 0), held)
        num_read = self.gpu.num_read
        with self.gpu.result():
            result: StepResult = pending.result()
        self.reads.setdefault(plan.kind, []).append(self.gpu.num_read - num_read)
        return result


def dry_run(
    gpu: FakeCuda, open_loader: Open, folder: Path, config: Config, capacity: int = 2**34
) -> DryRun:
    """The model in `folder`, on the fake device."""
    ledger = Ledger(capacity)
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="00")
    loaded = open_loader(resolved, config, Device(CUDA), ledger).load(lambda done: None)
    return DryRun(gpu, loaded, ledger)

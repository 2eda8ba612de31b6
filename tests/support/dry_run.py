"""Loads models onto a GPU that is not there, and takes their steps as the engine does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.driver import SchedulerDriver
from support.fake_cuda import CUDA, FakeCuda
from triptych.core.engine_api.plan import PendingStep, Plan, Runner, StepResult
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.schedulers.base import ModelLoader

Open = Callable[[ResolvedModel, Config, Device, Ledger], ModelLoader]


class WatchedRunner:
    """A runner whose launches and results the fake device looks at.

    By kind of plan: `peaks`, the most bytes that a step took beside what was there before, and
    `reads`, how many copies each result brought to the host.
    """

    def __init__(self, gpu: FakeCuda, runner: Runner) -> None:
        self._gpu, self._runner = gpu, runner
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.reads: defaultdict[str, list[int]] = defaultdict(list)

    def launch(self, plan: Plan) -> _Watched:
        before = self._gpu.live_bytes
        with self._gpu.launch():
            pending = self._runner.launch(plan)
        self.peaks[plan.kind] = max(self.peaks[plan.kind], self._gpu.peak_bytes - before)
        return _Watched(self, plan.kind, pending)

    def result(self, kind: str, pending: PendingStep) -> StepResult:
        num_read = self._gpu.num_read
        with self._gpu.result():
            result = pending.result()
        self.reads[kind].append(self._gpu.num_read - num_read)
        return result

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True)
class _Watched:
    runner: WatchedRunner
    kind: str
    pending: PendingStep

    def result(self) -> StepResult:
        return self.runner.result(self.kind, self.pending)


class DryRun(SchedulerDriver):
    """One loaded model, driven by its own scheduler."""

    runner: WatchedRunner

    def __init__(self, gpu: FakeCuda, loaded: Any, ledger: Ledger) -> None:
        super().__init__(loaded.scheduler, WatchedRunner(gpu, loaded.runner), model=loaded.name)
        self.gpu, self.ledger = gpu, ledger

    def end_well(self) -> None:
        """Run to the end; no job has an error."""
        self.run()
        for job_id in self.jobs:
            final = self.outputs.final(job_id)
            assert final is not None
            assert final.error is None


def dry_run(
    gpu: FakeCuda, open_loader: Open, folder: Path, config: Config, capacity: int = 2**34
) -> DryRun:
    """The model in `folder`, on the fake device."""
    ledger = Ledger(capacity)
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="00")
    loaded = open_loader(resolved, config, Device(CUDA), ledger).load(lambda done: None)
    return DryRun(gpu, loaded, ledger)

"""An engine in virtual time whose models come and go, with the jobs of a test."""

from __future__ import annotations

from support.engine_seams import FrameRequest, Recorder
from support.virtual import VirtualClock, VirtualExecutors
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.schedulers.base import ModelLoader
from triptych.schedulers.engine import EngineCore


class LoadBench:
    """An engine in virtual time with models that need memory."""

    def __init__(self, *loaders: ModelLoader, ledger: Ledger | None = None, config: Config) -> None:
        self.clock = VirtualClock()
        self.executors = VirtualExecutors(self.clock, lambda plan: 0.01)
        self.ledger = ledger or Ledger(0)
        self.engine = EngineCore(
            loaders, config=config, ledger=self.ledger, clock=self.clock, executors=self.executors
        )
        self.beats: list[Heartbeat] = []
        self.engine.on_beat = self.beats.append
        self.outputs = Recorder()

    def submit(self, job_id: str, model: str, num_frames: int = 3, **job: float) -> None:
        now_s = self.clock()
        self.engine.submit(
            Job(
                job_id=job_id,
                model=model,
                request=FrameRequest(num_frames=num_frames),
                sink=self.outputs,
                arrival_s=now_s,
                limit_s=job["deadline_s"] - now_s if "deadline_s" in job else None,
            )
        )

    def run_for(self, seconds: float) -> None:
        end_s = self.clock() + seconds
        while self.clock() < end_s:
            self.engine.take_turn()

    def finish(self, *job_ids: str) -> None:
        for _ in range(10_000):
            if all(map(self.outputs.final, job_ids)):
                return
            self.engine.take_turn()
        raise AssertionError("did not finish")

    def states(self) -> dict[str, str]:
        return {status.model: status.state for status in self.beats[-1].models}

    def codes(self, *job_ids: str) -> list[str | None]:
        return [self.outputs.error_code(job_id) for job_id in job_ids]

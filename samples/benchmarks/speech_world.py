"""A simulated speech server in virtual time: the cost of its steps, and its listeners.

Owns the simulation in which `speech_deadlines.py` compares policies: the real engine and timeline,
a device with a linear cost model, and listeners. There may also be files: long texts without
a listener.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from speech_baselines import Operation, WorkPlan

from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.plan import Plan, StepResult, TokenPlan
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.modalities.tts.plan import (
    SAMPLE_BYTES,
    AudioPlan,
    AudioRow,
    AudioRowResult,
    FrameClock,
)
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.state import SpeechModel
from triptych.modalities.tts.wire import SpeechRequest, SpeechSegment
from triptych.schedulers.base import LoadedModel, Scheduler
from triptych.schedulers.engine import EngineCore

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # for `support`
from support.virtual import VirtualClock, VirtualExecutors

MODEL = "voice"
WARM_UP_S = 10.0  # in which costs are learned; does not count
SAMPLE_RATE = 1200  # so that a frame of any length is whole samples; audio has no content here


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Milliseconds of a token step, of each row and prompt token in it; of audio likewise."""

    token_ms: float
    row_ms: float
    prompt_ms: float
    audio_ms: float
    audio_row_ms: float
    frame_ms: float
    frame_s: float
    steps_per_frame: int = 1

    def of(self, operation: Operation) -> float:
        """Seconds of one operation."""
        kind, num_rows, size = operation
        if kind == "token":
            return (self.token_ms + self.row_ms * num_rows + self.prompt_ms * size) / 1e3
        return (self.audio_ms + self.audio_row_ms * num_rows + self.frame_ms * size) / 1e3

    @property
    def clock(self) -> FrameClock:
        """Steps to frames."""
        return FrameClock(frame_s=self.frame_s, steps_per_frame=self.steps_per_frame)


PRESETS = MappingProxyType(
    {
        # A voice of some 15 M parameters on two cores.
        "cpu": Costs(
            token_ms=4.0,
            row_ms=0.6,
            prompt_ms=0.15,
            audio_ms=6.0,
            audio_row_ms=0.5,
            frame_ms=0.8,
            frame_s=0.08,
        ),
        # A 3 B model whose frames are seven tokens, on one H100.
        "gpu": Costs(
            token_ms=7.0,
            row_ms=0.02,
            prompt_ms=0.03,
            audio_ms=3.0,
            audio_row_ms=0.02,
            frame_ms=0.05,
            frame_s=0.085,
            steps_per_frame=7,
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load: the same listeners again and again, or a Poisson process (`rate_per_s`).

    Each of `num_files` clients sends its next request after its answer.
    """

    num_listeners: int = 0
    rate_per_s: float = 0.0
    num_files: int = 0
    duration_s: float = 40.0
    prompt_tokens: tuple[int, int] = (40, 240)
    median_speech_s: float = 6.0
    sigma: float = 0.5
    think_s: float = 0.5
    seed: int = 0

    @property
    def mean_speech_s(self) -> float:
        """Duration of an answer."""
        return self.median_speech_s * math.exp(self.sigma**2 / 2)


@dataclass(slots=True)
class Heard:
    """One answer as its listener heard it."""

    asked_s: float
    playback: Playback = field(default_factory=lambda: Playback(0.0))
    first_s: float = math.inf
    longest_gap_s: float = 0.0


class Runner:
    """Computes nothing; counts frames so that audio has the right length."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.clock = costs.clock
        self.num_samples = round(costs.frame_s * SAMPLE_RATE)
        self.pushed: dict[int, int] = {}
        self.ids = itertools.count()

    def operations(self, plan: Plan) -> tuple[Operation, ...]:
        """The operations of a plan."""
        if isinstance(plan, WorkPlan):
            return plan.operations
        if isinstance(plan, TokenPlan):
            num_rows = sum(not row.token_ids for row in plan.rows)
            return (Operation("token", num_rows, plan.num_tokens - num_rows),)
        assert isinstance(plan, AudioPlan)
        steps = sum(len(row.codes) for row in plan.rows)
        return (Operation("audio", len(plan.rows), round(steps / self.clock.steps_per_frame)),)

    def cost_s(self, plan: Plan) -> float:
        """The duration of a plan."""
        return sum(map(self.costs.of, self.operations(plan)))

    def launch(self, plan: Plan) -> Runner:
        """Record the plan."""
        self.plan = plan
        return self

    def result(self) -> StepResult:
        """The result of the plan launched last: nothing else runs at the same time."""
        plan, elapsed_s = self.plan, self.cost_s(self.plan)
        if isinstance(plan, TokenPlan):
            sampled = ((next(self.ids),) if row.is_sampled else () for row in plan.rows)
            rows = tuple(TokenDelta(token_ids=ids) for ids in sampled)
            return StepResult(elapsed_s=elapsed_s, rows=rows)
        if isinstance(plan, AudioPlan):
            sounds = tuple(map(self.decode, plan.rows))
            return StepResult(elapsed_s=elapsed_s, rows=sounds)
        return StepResult(elapsed_s=elapsed_s)

    def decode(self, row: AudioRow) -> AudioRowResult:
        """Silence of the right length."""
        before = 0 if row.is_first else self.pushed[row.slot]
        self.pushed[row.slot] = before + len(row.codes)
        num_frames = self.clock.num_frames(before + len(row.codes)) - self.clock.num_frames(before)
        return AudioRowResult(pcm=bytes(SAMPLE_BYTES * num_frames * self.num_samples))

    def close(self) -> None:
        """No resources are held."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduler with the options it was tried with."""

    name: str
    options: str
    make: Callable[[SpeechModel], Scheduler]


class World:
    """An engine in virtual time, and its listeners."""

    def __init__(self, policy: Policy, costs: Costs, load: Load) -> None:
        self.load = load
        self.costs = costs
        self.rng = random.Random(load.seed)
        self.clock = VirtualClock()
        runner = Runner(costs)
        self.executors = VirtualExecutors(self.clock, runner.cost_s)
        model = SpeechModel(name=MODEL, clock=costs.clock, sample_rate=SAMPLE_RATE)
        self.engine = EngineCore(
            [_Loader(policy.make(model), runner)],
            config=Config(), ledger=Ledger(0), clock=self.clock, executors=self.executors,
        )  # fmt: skip
        self.file_s = 0.0
        self.end_s = self.clock() + load.duration_s
        self.heard: list[Heard] = []
        self.ids = itertools.count()

    def run(self) -> list[Heard]:
        """The answers requested within the measured time."""
        self.engine._models.start()
        start_s = self.clock()
        for _ in range(self.load.num_listeners):
            self.executors.call_at(start_s + self.rng.uniform(0, 10), self.ask_again)
        if self.load.rate_per_s:
            self._come(start_s)
        for _ in range(self.load.num_files):
            self._make_file()
        while self.clock() < self.end_s:
            self.engine.take_turn()
        first_s, last_s = start_s + WARM_UP_S, self.end_s - 2.0
        return [heard for heard in self.heard if first_s <= heard.asked_s < last_s]

    def _make_file(self) -> None:
        """A long text without a listener, then the next."""
        self._submit(self._request(60.0, is_live=False), self._write)

    def _write(self, output: Output) -> None:
        self.file_s += len(output.payload.pcm) / SAMPLE_BYTES / SAMPLE_RATE if output.payload else 0
        if output.is_final:
            self._make_file()

    def _come(self, moment_s: float) -> None:
        """The next arrival of a Poisson process."""
        moment_s += self.rng.expovariate(self.load.rate_per_s)
        self.executors.call_at(moment_s, partial(self.ask, lambda heard: None))
        self.executors.call_at(moment_s, partial(self._come, moment_s))

    def ask_again(self) -> None:
        """Request, listen to the end, think, repeat."""
        self.ask(self._think)

    def _think(self, heard: Heard) -> None:
        pause_s = self.rng.expovariate(1 / self.load.think_s)
        self.executors.call_at(max(self.clock(), heard.playback.due_s) + pause_s, self.ask_again)

    def ask(self, then: Callable[[Heard], None]) -> None:
        """Send a request; `then` is called when all of its audio is there."""
        heard = Heard(self.clock())
        self.heard.append(heard)
        request = self._request(self._speech_s(), is_live=True)
        self._submit(request, partial(self._listen, heard, then))

    def _request(self, speech_s: float, *, is_live: bool) -> SpeechRequest:
        num_steps = self.costs.clock.num_steps(round(speech_s / self.costs.frame_s))
        num_words = self.rng.randint(*self.load.prompt_tokens)
        prompt = tuple(self.rng.randrange(1000) for _ in range(num_words))
        segment = SpeechSegment(prompt_ids=prompt, max_steps=num_steps)
        return SpeechRequest(segments=(segment,), sampling=SamplingParams(), is_live=is_live)

    def _submit(self, request: SpeechRequest, sink: Callable[[Output], None]) -> None:
        job_id = f"{next(self.ids)}"
        now_s = self.clock()
        self.engine.submit(
            Job(job_id=job_id, model=MODEL, request=request, sink=sink, arrival_s=now_s)
        )

    def _speech_s(self) -> float:
        """A log-normal length, within bounds."""
        length_s = self.rng.lognormvariate(math.log(self.load.median_speech_s), self.load.sigma)
        return min(max(length_s, 1.0), 120.0)

    def _listen(self, heard: Heard, then: Callable[[Heard], None], output: Output) -> None:
        assert output.error is None, output.error
        now_s = self.clock()
        if output.payload is not None and output.payload.pcm:
            heard.first_s = min(heard.first_s, now_s - heard.asked_s)
            if heard.playback.has_begun:
                heard.longest_gap_s = max(heard.longest_gap_s, now_s - heard.playback.due_s)
            seconds = len(output.payload.pcm) / SAMPLE_BYTES / SAMPLE_RATE
            heard.playback.give(seconds, now_s)
        if output.is_final:
            then(heard)


@dataclass(frozen=True, slots=True)
class _Loader:
    scheduler: Scheduler
    runner: Runner
    name: str = MODEL

    def check_size(self) -> None:
        pass

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        return LoadedModel(
            name=self.name,
            scheduler=self.scheduler,
            runner=self.runner,
            close=self.runner.close,
        )

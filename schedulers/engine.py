"""The loop: every model's steps on one timeline.

Owns one device's worth of work: the inbox, the steps in flight, the order of things. On each turn
it takes in what others asked for, asks every scheduler which step it would run next, lets the
timeline pick, books and launches it, and commits results in order. Plan N+1 is made and launched
while N runs. Knows nothing of what a step computes: tokens, frames and denoising steps are
proposals with a cost and a deadline.

State changes only in `submit`, `cancel`, `set_paused`, `book`, `commit` and `fail`, all called
from the thread in `run`. An error that a step raises ends that step's jobs. An error that a
scheduler raises is a fault of ours and ends the engine, since its books can no longer be trusted.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.core.engine_api.job import Job, Output, Sink, discard
from triptych.core.engine_api.plan import PendingStep, Plan, Runner
from triptych.core.engine_api.reports import Heartbeat, RunningStep, StepRecord, StepReport
from triptych.core.errors import (
    Draining,
    EngineDown,
    InvalidRequest,
    NonFinite,
    RequestTimeout,
    TriptychError,
    to_info,
)
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.process.metrics import STEP_SECONDS, Metrics
from triptych.schedulers.base import LoadedModel, ModelLoader, Proposal
from triptych.schedulers.cost import RecentSteps
from triptych.schedulers.executors import Clock, Executors, StepOutcome, ThreadExecutors
from triptych.schedulers.health import EngineCrashed, FailureCounter
from triptych.schedulers.heartbeat import HeartbeatSender, LoopState
from triptych.schedulers.model_manager import LoadDone, LoopHooks, ModelManager
from triptych.schedulers.step_log import StepLog
from triptych.schedulers.timeline import Timeline

DEPTH = 2
"""Steps in flight: one runs, one waits on the device."""

LEAD_S = 0.02
"""The next step is launched so long before the running one should end, and not sooner: what
becomes urgent during a long step need not wait behind a second one."""

STOP_TIMEOUT_S = 10.0
CRASH_TIMEOUT_S = 0.5
"""How long the end waits for the steps and the load in flight."""

_REBOOK_S = 0.01

_log = logging.getLogger(__name__)


class Engine:
    """One device, every model on it, one loop.

    `submit`, `cancel`, `set_paused`, `load`, `watch`, `drain` and `stop` may be called from any
    thread; they only leave word. `on_beat` gets each heartbeat, `on_steps` each report of steps
    while they are watched, and `on_turn` is called after each turn, all on the loop's thread; none
    may block.
    """

    def __init__(
        self,
        loaders: Sequence[ModelLoader],
        *,
        config: Config,
        ledger: Ledger,
        clock: Clock = time.monotonic,
        executors: Executors | None = None,
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.clock = clock
        self.metrics = Metrics()
        self.on_beat: Callable[[Heartbeat], None] = lambda beat: None
        self.on_steps: Callable[[StepReport], None] = lambda report: None
        self.on_turn: Callable[[], None] = lambda: None
        self._executors = executors if executors is not None else ThreadExecutors(clock)
        self._models = ModelManager(
            loaders,
            config=config,
            clock=clock,
            executors=self._executors,
            hooks=LoopHooks(
                admit=self._admit,
                refuse=self._refuse,
                submit=self._submit,
                is_idle=self._is_idle,
                metrics=self.metrics,
            ),
        )
        self._heartbeat = HeartbeatSender(
            ledger=ledger,
            metrics=self.metrics,
            min_stall_budget_s=config.server.min_stall_budget_s,
        )
        self._timeline = Timeline()
        self._recent = RecentSteps()
        self._step_log = StepLog()
        self._health = FailureCounter()
        self._fault_random = random.Random(config.device.seed)  # noqa: S311 (which steps to sabotage)
        self._jobs: dict[str, Job] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._in_flight: deque[Proposal] = deque()
        self._turn = 0
        self._next_step_id = 0
        self._wake_s = 0.0
        self._has_news = True
        self._is_draining = False
        self._is_stopping = False

    # What other threads may call.

    def submit(self, job: Job) -> None:
        """Run a job. Whatever is wrong with it reaches its sink as a final output."""
        self._executors.post(partial(self._submit, job))

    def cancel(self, job_ids: Collection[str]) -> None:
        """End jobs; unknown ids are ignored."""
        self._executors.post(partial(self._cancel, tuple(job_ids)))

    def set_paused(self, job_ids: Collection[str], is_paused: bool) -> None:
        """Hold jobs back, or let them go on; unknown ids are ignored."""
        self._executors.post(partial(self._set_paused, tuple(job_ids), is_paused))

    def load(self, model: str, done: LoadDone = lambda error: None) -> None:
        """Load a model now; `done` gets the outcome, on the loop's thread."""
        self._executors.post(partial(self._load, model, done))

    def watch(self, is_on: bool) -> None:
        """Report steps to `on_steps` from now on, or no longer."""
        self._executors.post(partial(self._step_log.switch, is_on))

    def warm(self) -> None:
        """On the loop's thread: have models begin what a first request of some kind waits for."""
        for loaded in self._models.ready.values():
            loaded.warm()

    def drain(self) -> None:
        """Take no new job; `run` returns when those in flight are finished."""
        self._executors.post(self._drain)

    def stop(self) -> None:
        """End every job with `EngineDown`; `run` returns when the steps in flight are over."""
        self._executors.post(self._stop)

    def run(self) -> None:
        """Turn until drained or stopped.

        Raises `SetupError` if a model cannot be loaded at start, and `EngineCrashed` or whatever
        a scheduler raised if the engine must be restarted. Jobs end with `EngineDown` then.
        """
        reason, patience_s = "The engine failed.", CRASH_TIMEOUT_S
        try:
            self._models.start()
            while not self._is_over():
                self.take_turn()
            reason, patience_s = "The engine was stopped.", STOP_TIMEOUT_S
        finally:
            self._shut_down(EngineDown(reason, retry_after_s=5.0), patience_s)

    def take_turn(self) -> None:
        """One turn: wait for something to do, and do it."""
        self._turn += 1
        self._executors.take(self._wake_s - self.clock())
        now_s = self.clock()
        self._wake_s = self._models.unload_idle(now_s)
        self._expire(now_s)
        self._launch_ahead()
        self._beat()
        if self._step_log.is_on:
            self._report_steps()
        self.on_turn()
        if reason := self._health.verdict(now_s):
            raise EngineCrashed(reason)

    # The turn, in order.

    def _expire(self, now_s: float) -> None:
        """End jobs that were not finished by their deadline, whatever they are about."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None and job.deadline_s is not None and job.deadline_s <= now_s:
                self._refuse(job, RequestTimeout("The request was not finished in time."))
                self._withdraw(job)
        if self._deadlines:
            self._wake_by(self._deadlines[0][0])

    def _launch_ahead(self) -> None:
        """Launch steps until enough are in flight, or nothing is to be launched yet."""
        declined: set[str] = set()
        while len(self._in_flight) < DEPTH:
            now_s = self.clock()
            if self._in_flight:
                running = self._in_flight[-1]
                launch_s = running.started_s + running.cost_s - LEAD_S
                if launch_s > now_s:
                    self._wake_by(launch_s)
                    return
            proposal = self._next_proposal(now_s, declined)
            if proposal is None:
                return
            if not self._launch(proposal, now_s):
                declined.add(proposal.model)
                self._wake_by(now_s + _REBOOK_S)

    def _next_proposal(self, now_s: float, declined: Collection[str]) -> Proposal | None:
        """The proposal whose turn it is."""
        proposals: list[Proposal] = []
        at_work = {job.model for job in self._jobs.values() if not job.is_paused}
        busy = at_work & self._models.ready.keys()
        for model, loaded in self._models.ready.items():
            self._set_step_budget(loaded, busy - {model})
            proposal = None if model in declined else loaded.scheduler.propose(now_s)
            if proposal is None:
                continue
            if proposal.not_before_s > now_s:
                self._wake_by(proposal.not_before_s)
            else:
                proposals.append(proposal)
        if not proposals:
            return None
        return self._timeline.pick(proposals, now_s)

    def _set_step_budget(self, loaded: LoadedModel, others: Collection[str]) -> None:
        """Say how long a model's steps may be beside those of others that have jobs."""
        budget_s = math.inf
        if others:
            longest_s = self.config.schedule.max_step_s or math.inf
            budget_s = min(longest_s, self._timeline.step_budget_s(loaded.name, others))
        loaded.scheduler.set_step_budget(budget_s)

    def _launch(self, proposal: Proposal, now_s: float) -> bool:
        """Book a proposal and hand its plan to the device; false if nothing was left of it."""
        loaded = self._models.ready[proposal.model]
        plan = loaded.scheduler.book(proposal, self._next_step_id, now_s)
        if plan is None:
            return False
        self._next_step_id += 1
        proposal.plan, proposal.started_s = plan, now_s
        self._timeline.charge(proposal.model, proposal.cost_s)
        self._in_flight.append(proposal)
        self._has_news = True
        is_sabotaged = self._fault_random.random() * 100 < self.config.debug.sim_failure
        runner = _FaultInjector(loaded.runner) if is_sabotaged else loaded.runner
        self._executors.launch(runner, plan, partial(self._conclude, proposal, plan))
        return True

    def _conclude(self, step: Proposal, plan: Plan, outcome: StepOutcome) -> None:
        """Commit a step's result, or fail its jobs."""
        finished = self._in_flight.popleft()
        assert finished is step, "steps must end in the order of their launch"
        now_s = self.clock()
        if self._in_flight:
            self._in_flight[0].started_s = now_s
        self._has_news = True
        model, kind = plan.model, plan.kind
        self._timeline.charge(model, outcome.busy_s - step.cost_s)
        self._models.touch(model)
        self.metrics.observe(STEP_SECONDS, outcome.busy_s, model=model, kind=kind)
        scheduler = self._models.ready[model].scheduler
        if self._step_log.is_on:
            self._step_log.note(_record_of(plan, outcome))
        if outcome.result is not None:
            self._health.note_success()
            self._recent.observe(outcome.busy_s)
            scheduler.commit(plan, outcome.result, now_s)
        else:
            assert outcome.error is not None
            self.metrics.add("triptych_failed_steps_total", model=model, kind=kind)
            error = self._health.note_failure(outcome.error, f"{model} {kind}")
            scheduler.fail(plan, error, now_s)

    def _beat(self, *, is_last: bool = False) -> None:
        """Beat if it is time, and only if the loop is not merely waiting for a step."""
        now_s = self.clock()
        in_flight_s = sum(step.cost_s for step in self._in_flight)
        budget_s = self._heartbeat.stall_budget_s(self._recent.p99_s, in_flight_s)
        is_due = self._heartbeat.is_due(now_s, budget_s) or self._models.take_news()
        beats_anyway = self._beats_anyway(now_s)
        if is_last or (is_due and (self._has_news or beats_anyway)):
            self._has_news = False
            state = LoopState(
                turn=self._turn,
                phase=self._phase(),
                stall_budget_s=budget_s,
                num_jobs=len(self._jobs),
                models=self._models.statuses(),
            )
            self.on_beat(self._heartbeat.beat(state, self._models.ready, now_s))
        if beats_anyway:
            self._wake_by(self._heartbeat.idle_until_s())

    def _report_steps(self) -> None:
        """Report what ran and what runs, if it is time."""
        now_s = self.clock()
        running = None
        if self._in_flight:
            step = self._in_flight[0]
            assert step.plan is not None, "what is in flight was booked"
            running = RunningStep(model=step.model, kind=step.plan.kind, start_s=step.started_s)
        is_running = running is not None
        if self._step_log.due_s(is_running=is_running) <= now_s:
            self.on_steps(self._step_log.report(running, now_s))
        self._wake_by(self._step_log.due_s(is_running=is_running))

    def _beats_anyway(self, now_s: float) -> bool:
        """Whether to beat without news: nothing runs, or what does may take any time."""
        if not self._in_flight:
            return True
        step = self._in_flight[0]
        return not step.is_known and self._heartbeat.beats_beside(now_s - step.started_s)

    def _phase(self) -> str:
        if self._is_draining:
            return "drain"
        if self._is_stopping:
            return "stop"
        if self._in_flight:
            return "step"
        return "load" if self._models.is_loading else "idle"

    def _wake_by(self, moment_s: float) -> None:
        self._wake_s = min(self._wake_s, moment_s)

    # What arrives through the inbox.

    def _submit(self, job: Job) -> None:
        if job.job_id in self._jobs:
            error = InvalidRequest("A job with this id is already running.")
            job.sink(Output(job_id=job.job_id, is_final=True, error=to_info(error)))
            return
        self._jobs[job.job_id] = job
        job.sink = partial(self._send, job, job.sink)
        try:
            if self._is_draining or self._is_stopping:
                raise Draining("The server is shutting down.", retry_after_s=5.0)
            self._limit(job)
            self._models.take(job)
        except TriptychError as error:
            self._refuse(job, error)

    def _limit(self, job: Job) -> None:
        """Have a job end in time. One moment that is no number would put all out of order."""
        if job.deadline_s is None:
            return
        if math.isnan(job.deadline_s):
            raise InvalidRequest("The time limit of a job must be a number of seconds.")
        heapq.heappush(self._deadlines, (job.deadline_s, job.job_id))

    def _admit(self, loaded: LoadedModel, job: Job) -> None:
        """Hand a job to its loaded model's scheduler."""
        try:
            loaded.scheduler.submit(job)
        except TriptychError as error:
            self._refuse(job, error)
        else:
            if job.is_paused:
                loaded.scheduler.set_paused(job.job_id, True)

    def _send(self, job: Job, sink: Sink, output: Output) -> None:
        """Every output of a job passes here; nothing follows the final one."""
        if output.is_final:
            del self._jobs[job.job_id]
            job.sink = discard  # this one knows the job: they would keep each other in memory
            if output.error is not None and output.error.code == NonFinite.code:
                self._health.note_non_finite(self.clock())
        sink(output)

    def _refuse(self, job: Job, error: TriptychError) -> None:
        job.sink(Output(job_id=job.job_id, is_final=True, error=to_info(error)))

    def _cancel(self, job_ids: tuple[str, ...]) -> None:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None:
                self._withdraw(job)
                job.sink(Output(job_id=job_id, is_final=True))

    def _withdraw(self, job: Job) -> None:
        """Take a job away from its scheduler or loader; the scheduler may send a last output."""
        if not self._models.drop(job):
            self._models.ready[job.model].scheduler.cancel(job.job_id)

    def _set_paused(self, job_ids: tuple[str, ...], is_paused: bool) -> None:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.is_paused = is_paused
            if (loaded := self._models.ready.get(job.model)) is not None:
                loaded.scheduler.set_paused(job_id, is_paused)

    def _load(self, model: str, done: LoadDone) -> None:
        try:
            self._models.load(model, done)
        except TriptychError as error:
            done(error)

    def _drain(self) -> None:
        self._is_draining = True
        self._has_news = True

    def _stop(self) -> None:
        self._is_stopping = True

    def _is_idle(self, model: str) -> bool:
        """Whether no job and no step in flight needs a model."""
        return not any(job.model == model for job in self._jobs.values()) and not any(
            step.model == model for step in self._in_flight
        )

    def _is_over(self) -> bool:
        return self._is_stopping or (self._is_draining and not self._jobs and not self._in_flight)

    def _shut_down(self, error: EngineDown, patience_s: float) -> None:
        """End every job and beat a last time; then release models and threads."""
        self._is_stopping = True
        for job in tuple(self._jobs.values()):
            self._refuse(job, error)
        self._beat(is_last=True)
        self.on_turn()
        self._models.close()
        self._executors.close(patience_s)


def _record_of(plan: Plan, outcome: StepOutcome) -> StepRecord:
    return StepRecord(
        model=plan.model,
        kind=plan.kind,
        num_rows=len(outcome.result.rows) if outcome.result is not None else 0,
        start_s=outcome.ended_s - outcome.busy_s,
        length_s=outcome.busy_s,
        busy_s=outcome.busy_s,
        is_failed=outcome.result is None,
    )


@dataclass(frozen=True, slots=True)
class _FaultInjector:
    """A runner that fails once its work is launched, for `sim_failure`."""

    runner: Runner

    def launch(self, plan: Plan) -> PendingStep:
        self.runner.launch(plan)
        raise RuntimeError("simulated failure")

    def close(self) -> None:
        """The runner behind it is closed by its model."""

"""The engine's loop: the steps of all models on one timeline.

One turn of the loop (`EngineCore.take_turn`):

    wait for calls in the inbox, or until the next moment something is due   # _executors.take
    for each call: submit, cancel, pause or load; commit or fail an ended step
    unload idle models; end jobs past their deadline                         # _expire
    while fewer than DEPTH steps are in flight:                              # _launch_ahead
        if a step runs: stop until LEAD_S before its predicted end
        proposals = [scheduler.propose() for each ready model]               # changes nothing
        proposal = timeline.pick(proposals)                                  # fair share, deadlines
        plan = scheduler.book(proposal)                                      # takes pages and slots
        executors.launch(plan)      # its result is posted to the inbox, in order of the launches
    send a heartbeat and a step report if they are due                       # _beat
    raise if the device is broken                                            # FailureCounter

Owns the work of one device: the inbox, the steps in flight, their order. Step N+1 is planned and
launched while N runs. Knows nothing of what a step computes: token, audio and denoising steps are
proposals with a cost and a deadline.

State changes only in `submit`, `cancel`, `set_paused`, `book`, `commit` and `fail`, all called
from the thread in `run`. An error that a step raises ends that step's jobs. An error that a
scheduler raises is a bug and ends the engine, since its state can no longer be trusted.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from msgspec import structs

from triptych.core.engine_api.job import Job, JobState, Output, Sink, discard
from triptych.core.engine_api.job_report import QUEUE, JobRecorder
from triptych.core.engine_api.model_changes import ModelChange, Sleep
from triptych.core.engine_api.plan import Plan
from triptych.core.engine_api.reports import ASLEEP, Heartbeat, RunningStep, StepReport
from triptych.core.errors import (
    Asleep,
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
from triptych.schedulers.health import EngineCrashed, FailureCounter, FaultInjector
from triptych.schedulers.heartbeat import HeartbeatSender, LoopState
from triptych.schedulers.model_entry import OpenLoader
from triptych.schedulers.model_manager import LoopHooks, ModelManager
from triptych.schedulers.sleeping import ChangeDone
from triptych.schedulers.step_log import StepLog
from triptych.schedulers.timeline import Timeline

DEPTH = 2
"""Steps in flight: one runs, one waits on the device."""

LEAD_S = 0.02
"""The next step is launched this long before the predicted end of the running one, not sooner:
work that becomes urgent during a long step need not wait behind a second one."""

STOP_TIMEOUT_S = 10.0
CRASH_TIMEOUT_S = 0.5
"""How long shutdown waits for the steps and the load in flight."""

_REBOOK_S = 0.01
_FIRST_OUTPUTS = ("first_token_s", "first_output_s", "first_audio_s")  # one of them per job

_log = logging.getLogger(__name__)


class EngineCore:
    """Runs all models of one device in one loop.

    `submit`, `cancel`, `set_paused`, `change`, `watch`, `drain` and `stop` may be called from any
    thread; they only post to the loop's inbox. `on_beat` receives each heartbeat, `on_steps` each
    report of steps while they are watched, and `on_turn` is called after each turn, all on the
    loop's thread; none may block.
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
        self.device = ""  # in words
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
        self._fault_random = random.Random(config.device.seed)  # noqa: S311 (chooses steps to fail)
        self._jobs: dict[str, Job] = {}
        self._busy_s: dict[tuple[str, str], float] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._in_flight: deque[Proposal] = deque()
        self._turn = 0
        self._next_step_id = 0
        self._wake_s = 0.0
        self._has_news = True
        self._is_draining = False
        self._is_stopping = False

    @property
    def open_loader(self) -> OpenLoader:
        """Opens the loader of a model that is added while the engine runs. May be set."""
        return self._models.open_loader

    @open_loader.setter
    def open_loader(self, open_loader: OpenLoader) -> None:
        self._models.open_loader = open_loader

    # Callable from any thread.

    def submit(self, job: Job) -> None:
        """Run a job. Its sink receives every error as a final output."""
        self._executors.post(partial(self._submit, job))

    def cancel(self, job_ids: Collection[str]) -> None:
        """End jobs; unknown ids are ignored."""
        self._executors.post(partial(self._cancel, tuple(job_ids)))

    def set_paused(self, job_ids: Collection[str], is_paused: bool) -> None:
        """Pause or resume jobs; unknown ids are ignored."""
        self._executors.post(partial(self._set_paused, tuple(job_ids), is_paused))

    def change(self, change: ModelChange, done: ChangeDone = lambda error: None) -> None:
        """Change the models; `done` receives the outcome, on the loop's thread."""
        self._executors.post(partial(self._change, change, done))

    def watch(self, is_on: bool) -> None:
        """Start or stop reporting steps to `on_steps`."""
        self._executors.post(partial(self._step_log.switch, is_on))

    def leave_start_to(self, on_beat: Callable[[Heartbeat], None]) -> None:
        """Show the start by beats: its loads are log lines at level debug only."""
        self.on_beat = on_beat
        self._models.is_start_shown = True

    def warm(self) -> None:
        """On the loop's thread: start the preparations that a first request would wait for."""
        for loaded in self._models.ready.values():
            loaded.warm()

    def drain(self) -> None:
        """Refuse new jobs; `run` returns when those in flight are finished."""
        self._executors.post(self._drain)

    def stop(self) -> None:
        """End every job with `EngineDown`; `run` returns when the steps in flight have ended."""
        self._executors.post(self._stop)

    def run(self) -> None:
        """Take turns until drained or stopped.

        Raises `SetupError` if a model cannot be loaded at start, and `EngineCrashed` or a
        scheduler's error if the engine must be restarted. Jobs then end with `EngineDown`.
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
        """Take one turn: wait for an event, then do what is due."""
        self._turn += 1
        self._executors.take(self._wake_s - self.clock())
        now_s = self.clock()
        self._wake_s = self._models.unload_due(now_s)
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
        """End jobs that were not finished by their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None and job.deadline_s is not None and job.deadline_s <= now_s:
                self._refuse(job, RequestTimeout("The request was not finished in time."))
                self._remove(job)
        if self._deadlines:
            self._wake_by(self._deadlines[0][0])

    def _launch_ahead(self) -> None:
        """Launch steps until enough are in flight or no step may be launched yet."""
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
        """The proposal that the timeline picks, of all models' proposals."""
        proposals: list[Proposal] = []
        busy: set[str] = set()
        if len(self._models.ready) > 1:
            busy = {job.model for job in self._jobs.values() if not job.is_paused}
            busy &= self._models.ready.keys()
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
        """Bound a model's steps by the gaps of the `others`, models that have jobs."""
        budget_s = math.inf
        if others:
            longest_s = self.config.schedule.max_step_s or math.inf
            budget_s = min(longest_s, self._timeline.step_budget_s(loaded.name, others))
        loaded.scheduler.set_step_budget(budget_s)

    def _launch(self, proposal: Proposal, now_s: float) -> bool:
        """Book a proposal and launch its plan; false if nothing was left to run."""
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
        runner = FaultInjector(loaded.runner) if is_sabotaged else loaded.runner
        self._executors.launch(runner, plan, partial(self._finish_step, proposal, plan))
        return True

    def _finish_step(self, step: Proposal, plan: Plan, outcome: StepOutcome) -> None:
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
            self._step_log.note(outcome.record(plan))
        if outcome.result is not None:
            self._health.note_success()
            self._recent.observe(outcome.busy_s)
            scheduler.commit(plan, outcome.result, now_s)
        else:
            assert outcome.error is not None
            self.metrics.add("triptych_failed_steps_total", model=model, kind=kind)
            error = self._health.note_failure(outcome.error, f"{model} {kind}")
            scheduler.fail(plan, error, now_s)
        self._busy_s[model, kind] = self._busy_s.get((model, kind), 0.0) + outcome.busy_s

    def _beat(self, *, is_last: bool = False) -> None:
        """Send a heartbeat if one is due, unless the loop merely waits for a step."""
        now_s = self.clock()
        in_flight_s = sum(step.cost_s for step in self._in_flight)
        budget_s = self._heartbeat.stall_budget_s(self._recent.p99_s, in_flight_s)
        is_due = self._heartbeat.is_due(now_s, budget_s) or self._models.take_news()
        beats_without_news = self._beats_without_news(now_s)
        if is_last or (is_due and (self._has_news or beats_without_news)):
            self._has_news = False
            state = LoopState(
                turn=self._turn,
                phase=self._phase(),
                stall_budget_s=budget_s,
                num_jobs=len(self._jobs),
                models=self._models.statuses(),
            )
            self.on_beat(self._heartbeat.beat(state, self._models.ready, now_s))
        if beats_without_news:
            self._wake_by(self._heartbeat.idle_until_s())

    def _report_steps(self) -> None:
        """Report ended and running steps, if a report is due."""
        now_s = self.clock()
        running = None
        if self._in_flight:
            step = self._in_flight[0]
            assert step.plan is not None, "a step in flight was booked"
            running = RunningStep(model=step.model, kind=step.plan.kind, start_s=step.started_s)
        is_running = running is not None
        if self._step_log.due_s(is_running=is_running) <= now_s:
            self.on_steps(self._step_log.report(running, now_s))
        self._wake_by(self._step_log.due_s(is_running=is_running))

    def _beats_without_news(self, now_s: float) -> bool:
        """Whether to beat without news: no step runs, or one of unknown duration does."""
        if not self._in_flight:
            return True
        step = self._in_flight[0]
        return not step.is_known and self._heartbeat.beats_during(now_s - step.started_s)

    def _phase(self) -> str:
        if self._is_draining:
            return "drain"
        if self._is_stopping:
            return "stop"
        if self._in_flight:
            return "step"
        if self._models.is_loading:
            return "load"
        return ASLEEP if self._models.is_asleep else "idle"

    def _wake_by(self, moment_s: float) -> None:
        self._wake_s = min(self._wake_s, moment_s)

    # Calls from the inbox.

    def _submit(self, job: Job) -> None:
        if job.job_id in self._jobs:
            error = InvalidRequest("A job with this id is already running.")
            job.sink(Output(job_id=job.job_id, is_final=True, error=to_info(error)))
            return
        self._jobs[job.job_id] = job
        job.record = JobRecorder(job.arrival_s, self._busy_s)
        job.sink = partial(self._send, job, job.sink)
        try:
            if self._is_draining or self._is_stopping:
                raise Draining("The server is shutting down.", retry_after_s=5.0)
            self._set_deadline(job)
            self._models.submit(job)
        except TriptychError as error:
            self._refuse(job, error)

    def _set_deadline(self, job: Job) -> None:
        """Register the job's deadline. NaN is refused because it would break the heap's order."""
        if job.deadline_s is None:
            return
        if math.isnan(job.deadline_s):
            raise InvalidRequest("The time limit of a job must be a number of seconds.")
        heapq.heappush(self._deadlines, (job.deadline_s, job.job_id))

    def _admit(self, loaded: LoadedModel, job: Job) -> None:
        """Submit a job to its loaded model's scheduler."""
        job.recorder.wait(QUEUE, self.clock())  # the wait for a load is over
        try:
            loaded.scheduler.submit(job)
        except TriptychError as error:
            self._refuse(job, error)
        else:
            if job.is_paused:
                loaded.scheduler.set_paused(job.job_id, True)

    def _send(self, job: Job, sink: Sink, output: Output) -> None:
        """Pass an output of a job to its sink; no output follows the final one."""
        if output.is_final:
            del self._jobs[job.job_id]
            job.sink = job.feed = discard  # breaks the reference cycle of job and sink
            if output.error is not None and output.error.code == NonFinite.code:
                self._health.note_non_finite(self.clock())
            output = self._with_report(job, output)
        sink(output)

    def _with_report(self, job: Job, output: Output) -> Output:
        """The final output of a job with its account."""
        state = JobState.CANCELLED if output.error is None else JobState.FAILED
        if job.state is JobState.FINISHED:
            state = JobState.FINISHED
        times = job.timings
        first_s = next((times[name] for name in _FIRST_OUTPUTS if name in times), None)
        report = job.recorder.report(state.value, self.clock(), first_s)
        return structs.replace(output, report=report)

    def _refuse(self, job: Job, error: TriptychError) -> None:
        job.sink(Output(job_id=job.job_id, is_final=True, error=to_info(error)))

    def _cancel(self, job_ids: tuple[str, ...]) -> None:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None:
                self._remove(job)
                job.sink(Output(job_id=job_id, is_final=True))

    def _remove(self, job: Job) -> None:
        """Remove a job from its scheduler or loader; the scheduler may send a last output."""
        if not self._models.drop(job):
            self._models.ready[job.model].scheduler.cancel(job.job_id)

    def _set_paused(self, job_ids: tuple[str, ...], is_paused: bool) -> None:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is None:
                continue
            if job.is_paused != is_paused:
                job.recorder.set_paused(is_paused, self.clock())
            job.is_paused = is_paused
            if (loaded := self._models.ready.get(job.model)) is not None:
                loaded.scheduler.set_paused(job_id, is_paused)

    def _change(self, change: ModelChange, done: ChangeDone) -> None:
        if isinstance(change, Sleep) and change.ends_jobs:
            for job in tuple(self._jobs.values()):
                self._refuse(job, Asleep("The server was put to sleep.", retry_after_s=5.0))
                self._remove(job)
        try:
            self._models.change(change, done)
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
        """End every job and send a last heartbeat; then release models and threads."""
        self._is_stopping = True
        for job in tuple(self._jobs.values()):
            self._refuse(job, error)
        self._beat(is_last=True)
        self.on_turn()
        self._models.close()
        self._executors.close(patience_s)

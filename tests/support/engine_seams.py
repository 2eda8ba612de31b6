"""Small stand-ins at the engine's seams: clock, device, model, a second modality."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.plan import (
    Plan,
    Runner,
    StepResult,
    TokenPlan,
    TokenRow,
)
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.errors import MemoryBudgetExceeded, TriptychError, to_info
from triptych.core.ledger import Ledger
from triptych.schedulers.base import LoadedModel, Proposal, Scheduler, SchedulerStats
from triptych.schedulers.batcher import ScheduledStep
from triptych.schedulers.cost import CostModel


@dataclass
class Done:
    """A pending step that is over, well or badly."""

    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """The fake model: the next token is a hash of all tokens before it."""
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest()) % vocab_size


class FakeRunner:
    """A deterministic model of tokens that keeps its cache in pages, as a real one must.

    What a row attends to is read back through its page table, so a page that is lost, shared or
    overwritten shows in the text. `poison` maps a job id to how many tokens it may yield before
    its logits turn to NaN; `errors` maps the number of a launch to what it raises.
    """

    def __init__(self, *, page_size: int, vocab_size: int = 1000) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.poison: dict[str, int] = {}
        self.errors: dict[int, Exception] = {}
        self.num_launches = 0
        self.is_closed = False
        self._cells: dict[tuple[int, int], int] = {}
        self._tables: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}
        self._num_yielded: dict[str, int] = {}

    def launch(self, plan: Plan) -> Done:
        assert isinstance(plan, TokenPlan)
        self.num_launches += 1
        for start in plan.starts:
            self._tables[start.slot] = []
        for row in plan.rows:
            self._tables[row.slot].extend(row.new_page_ids)
        if (error := self.errors.pop(self.num_launches, None)) is not None:
            return Done(error)
        rows = tuple(self._row(row) for row in plan.rows)
        return Done(StepResult(rows=rows))

    def close(self) -> None:
        self.is_closed = True

    def _row(self, row: TokenRow) -> TokenDelta:
        table = self._tables[row.slot]
        token_ids = row.token_ids or (self._last.get(row.slot, 0),)
        assert len(token_ids) == row.num_tokens
        for position, token_id in enumerate(token_ids, row.start):
            self._cells[self._cell(table, position)] = token_id
        if not row.is_sampled:
            return TokenDelta()
        end = row.start + row.num_tokens
        # A cell is blank only behind a step that failed, and what comes of it is dropped.
        context = [self._cells.get(self._cell(table, at), 0) for at in range(end)]
        sampled: list[int] = []
        for num_right in range(row.num_drafts + 1):
            allowed = row.allowed_after(num_right)
            before = context[: end - row.num_drafts + num_right]
            sampled.append(self.sample(structs.replace(row, allowed=allowed), before))
            if sampled[-1:] != context[len(before) : len(before) + 1]:
                break
        self._last[row.slot] = sampled[-1]
        self._num_yielded[row.job_id] = self._num_yielded.get(row.job_id, 0) + 1
        if self._num_yielded[row.job_id] > self.poison.get(row.job_id, 1 << 30):
            return TokenDelta(token_ids=(0,), is_finite=False)
        return TokenDelta(token_ids=tuple(sampled))

    def sample(self, row: TokenRow, context: Sequence[int]) -> int:
        """The token that a row yields after `context`."""
        return next_token(context, self.vocab_size)

    def _cell(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self.page_size], position % self.page_size


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """A stream of `num_frames` frames, one wanted every `period_s` (0: as fast as can be)."""

    num_frames: int
    period_s: float = 0.0


@dataclass(slots=True)
class _Voice:
    job: Job
    num_frames: int = 0
    num_booked: int = 0


class FakeFrames:
    """A scheduler of a second modality: frames with playback deadlines, all voices in one step.

    Frame k may be made from `arrival + k x period` on and is due one period later. With period 0
    frames have no deadline, like denoising steps. Remembers when frames were committed.
    """

    def __init__(self, model: str, *, kind: str = "frame", depth: int = 1) -> None:
        self.model = model
        self.kind = kind
        self.depth = depth
        self.costs = CostModel()
        self.lateness_s: list[float] = []
        self.failed: list[TriptychError] = []
        self.paused: set[str] = set()
        self.num_pauses = 0
        self._voices: dict[str, _Voice] = {}

    def submit(self, job: Job) -> None:
        self._voices[job.job_id] = _Voice(job)

    def cancel(self, job_id: str) -> None:
        voice = self._voices.pop(job_id)
        voice.job.state = JobState.CANCELLED
        voice.job.sink(Output(job_id=job_id, is_final=True))

    def set_step_budget(self, budget_s: float) -> None: ...

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        (self.paused.add if is_paused else self.paused.discard)(job_id)
        self.num_pauses += is_paused

    def propose(self, now_s: float) -> Proposal | None:
        waiting = [v for v in self._voices.values() if self._has_work(v)]
        if not waiting:
            return None
        release_s = min(self._release_s(voice) for voice in waiting)
        rows = [voice for voice in waiting if self._release_s(voice) <= now_s]
        return ScheduledStep(
            kind=self.kind,
            model=self.model,
            cost_s=self.costs.predict(self.kind, {"frames": float(len(rows))}),
            is_known=self.costs.is_known(self.kind),
            due_s=min((self._due_s(voice) for voice in rows), default=math.inf),
            rows=rows,
            not_before_s=release_s,
        )

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        assert isinstance(proposal, ScheduledStep)
        rows = proposal.rows
        assert rows
        for voice in rows:
            voice.num_booked += 1
        return FramePlan(
            step_id=step_id,
            model=self.model,
            kind=self.kind,
            job_ids=tuple(voice.job.job_id for voice in rows),
        )

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        assert isinstance(plan, FramePlan)
        self.costs.observe(plan.kind, {"frames": float(len(plan.job_ids))}, result.elapsed_s)
        for voice in self._rows(plan):
            request = voice.job.request
            if request.period_s:
                self.lateness_s.append(
                    now_s - voice.job.arrival_s - (voice.num_frames + 1) * request.period_s
                )
            voice.num_frames += 1
            is_final = voice.num_frames == request.num_frames
            if is_final:
                del self._voices[voice.job.job_id]
            voice.job.sink(
                Output(job_id=voice.job.job_id, payload=voice.num_frames, is_final=is_final)
            )

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        self.failed.append(error)
        for voice in self._rows(plan):
            del self._voices[voice.job.job_id]
            voice.job.sink(Output(job_id=voice.job.job_id, is_final=True, error=to_info(error)))

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=0, num_running=len(self._voices), gauges={"voices": 1.0}, counters={}
        )

    def check(self) -> None:
        assert all(v.num_booked >= v.num_frames for v in self._voices.values())

    def _rows(self, plan: Plan) -> Iterator[_Voice]:
        assert isinstance(plan, FramePlan)
        return (self._voices[job_id] for job_id in plan.job_ids if job_id in self._voices)

    def _has_work(self, voice: _Voice) -> bool:
        return (
            voice.job.job_id not in self.paused
            and voice.num_booked < voice.job.request.num_frames
            and voice.num_booked - voice.num_frames < self.depth
        )

    def _release_s(self, voice: _Voice) -> float:
        return voice.job.arrival_s + voice.num_booked * voice.job.request.period_s

    def _due_s(self, voice: _Voice) -> float:
        period_s = voice.job.request.period_s
        return self._release_s(voice) + period_s if period_s else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlan(Plan):
    """One frame for each of some jobs."""

    job_ids: tuple[str, ...]


class FrameRunner:
    """Runs frame plans: nothing to compute. Holds each step until `gate` opens, if there is one."""

    def __init__(self, *, errors: Mapping[int, Exception] | None = None) -> None:
        self.errors = dict(errors or {})
        self.gate: threading.Event | None = None
        self.launched: list[Plan] = []

    def launch(self, plan: Plan) -> FrameStep:
        self.launched.append(plan)
        if (error := self.errors.get(len(self.launched))) is not None:
            raise error
        return FrameStep(plan.step_id, self.gate)

    def close(self) -> None: ...


@dataclass
class FrameStep:
    """A frame step on its way."""

    step_id: int
    gate: threading.Event | None

    def result(self) -> StepResult:
        if self.gate is not None:
            assert self.gate.wait(timeout=30)
        return StepResult()


@dataclass
class FakeLoader:
    """Loads what `make` makes; holds `num_bytes` of the ledger meanwhile.

    `gate` holds a load back; `errors` are raised by the first loads, one each.
    """

    name: str
    make: Callable[[], tuple[Scheduler, Runner]]
    ledger: Ledger | None = None
    num_bytes: int = 0
    gate: threading.Event | None = None
    errors: list[Exception] = field(default_factory=list)
    num_loads: int = 0
    num_closed: int = 0

    def check_size(self) -> None:
        if self.ledger is not None:
            Ledger(self.ledger.capacity_bytes).reserve(self.name, self.num_bytes)

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        self.num_loads += 1
        report(0.5)
        if self.gate is not None:
            assert self.gate.wait(timeout=30)
        if self.errors:
            raise self.errors.pop(0)
        held = self.ledger.reserve(self.name, self.num_bytes) if self.ledger else None
        scheduler, runner = self.make()

        def close() -> None:
            self.num_closed += 1
            runner.close()
            if held is not None:
                held.release()

        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)


class Recorder:
    """A sink that remembers, and lets a test wait for what it is waiting for."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self._changed = threading.Condition()

    def __call__(self, output: Output) -> None:
        with self._changed:
            self.outputs.setdefault(output.job_id, []).append(output)
            self._changed.notify_all()

    def __getitem__(self, job_id: str) -> list[Output]:
        """All that a job was sent."""
        return self.outputs.setdefault(job_id, [])

    def final(self, job_id: str) -> Output | None:
        """The last output of a job, if it has ended."""
        last = (self.outputs.get(job_id) or [None])[-1]
        return last if last is not None and last.is_final else None

    def wait_final(self, *job_ids: str, timeout_s: float = 30.0) -> None:
        """Wait until jobs have ended."""
        with self._changed:
            done = self._changed.wait_for(lambda: all(map(self.final, job_ids)), timeout_s)
        assert done, f"still running: {[job for job in job_ids if not self.final(job)]}"

    def error_code(self, job_id: str) -> str | None:
        """How a job failed, if it did."""
        final = self.final(job_id)
        return final.error.code if final is not None and final.error is not None else None


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait, within bounds, until another thread has made `condition` true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.001)


def no_room(owner: str) -> MemoryBudgetExceeded:
    """What the ledger says when it is full."""
    return MemoryBudgetExceeded(f"{owner} does not fit.")

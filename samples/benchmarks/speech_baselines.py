"""Two common schedulers of speech, as baselines.

Both implement `triptych.schedulers.base.Scheduler` for the same requests, and batch as well as
they can, but do not know when a listener needs the next audio.

- `FifoScheduler`: every step (a prompt, a token, a chunk of audio) runs in the order in which it
  became ready, batched with all others of its kind that are ready by then.
- `MaxScheduler`: the policy of Modular MAX's former scheduler for speech. Prompts of new requests
  run as a batch, after waiting for more requests (`ce_delay_ms`); then rounds of a chunk for every
  request, tokens and audio as one unit of work, while at least `min_batch_size_tg` requests run.
  `enable_prioritize_first_decode` gives new requests a round first.

Nothing is computed: a plan holds the operations from which its costs are derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import TriptychError, to_info
from triptych.modalities.tts.plan import SAMPLE_BYTES
from triptych.modalities.tts.scheduling.state import SpeechModel
from triptych.modalities.tts.wire import SpeechDelta
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.batcher import ScheduledStep
from triptych.schedulers.cost import CostModel


class Operation(NamedTuple):
    """The inputs of the cost model: decoding rows and prompt tokens, or rows and frames."""

    kind: str
    num_rows: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlan(Plan):
    """Operations that run one after another, as one step."""

    operations: tuple[Operation, ...]


@dataclass(slots=True, eq=False)
class _Voice:
    """One request: steps sampled, frames decoded, and since when each was ready."""

    job: Job
    since_s: float
    num_steps: int = 0
    num_frames: int = 0
    num_chunks: int = 0
    is_started: bool = False
    chunk_since_s: float = math.inf

    @property
    def max_steps(self) -> int:
        return int(self.job.request.segments[0].max_steps)

    @property
    def num_prompt(self) -> int:
        return len(self.job.request.segments[0].prompt_ids)

    @property
    def is_sampled(self) -> bool:
        return self.num_steps >= self.max_steps


class _Baseline:
    """The common part: requests arrive, a step runs, audio is sent."""

    def __init__(self, model: SpeechModel, *, chunks: Sequence[int], max_rows: int) -> None:
        self.model = model
        self.chunks = chunks
        self.max_rows = max_rows
        self.costs = CostModel()
        self.voices: dict[str, _Voice] = {}
        self.is_busy = False

    def submit(self, job: Job) -> None:
        """Add a request."""
        self.voices[job.job_id] = _Voice(job, job.arrival_s)

    def cancel(self, job_id: str) -> None:
        """Remove a request."""
        self.voices.pop(job_id, None)

    def set_step_budget(self, budget_s: float) -> None:
        """Steps cannot be made shorter."""

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Pausing is not supported."""

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End all requests."""
        for voice in self.voices.values():
            voice.job.sink(Output(job_id=voice.job.job_id, is_final=True, error=to_info(error)))
        self.voices.clear()

    def stats(self) -> SchedulerStats:
        """Counts of requests."""
        return SchedulerStats(num_waiting=0, num_running=len(self.voices), gauges={}, counters={})

    def check(self) -> None:
        """No resources are held."""

    def proposal(self, kind: str, rows: Iterable[_Voice]) -> ScheduledStep:
        """A step for `rows`, all equally urgent."""
        voices = tuple(rows)
        cost_s = self.costs.predict(kind, {"rows": float(len(voices))})
        return ScheduledStep(model=self.model.name, cost_s=cost_s, kind=kind, rows=voices)

    def plan(self, step_id: int, step: ScheduledStep, *operations: Operation) -> WorkPlan:
        """The plan of some operations; nothing else runs meanwhile."""
        self.is_busy, self.rows = True, tuple(step.rows)
        return WorkPlan(
            step_id=step_id, model=self.model.name, kind=step.kind, operations=operations
        )

    def chunk_frames(self, voice: _Voice) -> int:
        """Frames of the next chunk."""
        return self.chunks[min(voice.num_chunks, len(self.chunks) - 1)]

    def ready_frames(self, voice: _Voice) -> int:
        """Frames sampled and not decoded."""
        return self.model.clock.num_frames(voice.num_steps) - voice.num_frames

    def give(self, voice: _Voice, num_frames: int) -> None:
        """Send the audio of some frames."""
        voice.num_frames += num_frames
        voice.num_chunks += 1
        num_samples = round(num_frames * self.model.clock.frame_s * self.model.sample_rate)
        pcm = bytes(SAMPLE_BYTES * num_samples)
        is_final = voice.is_sampled and not self.ready_frames(voice)
        delta = SpeechDelta(pcm=pcm, finish_reason="stop" if is_final else None)
        if is_final:
            voice.job.state = JobState.FINISHED
            del self.voices[voice.job.job_id]
        voice.job.sink(Output(job_id=voice.job.job_id, payload=delta, is_final=is_final))


class FifoScheduler(_Baseline):
    """First in, first out, step by step, in full batches."""

    def __init__(
        self,
        model: SpeechModel,
        *,
        chunks: Sequence[int],
        max_rows: int,
        max_prompt_tokens: int = 2048,
    ) -> None:
        super().__init__(model, chunks=chunks, max_rows=max_rows)
        self.max_prompt_tokens = max_prompt_tokens

    def propose(self, now_s: float) -> Proposal | None:
        """The kind of step that has been ready the longest."""
        if self.is_busy:
            return None
        kinds = {"audio": self._chunks(), "token": self._rows(), "prompt": self._prompts()}
        since_s = {kind: min(since for since, _ in rows) for kind, rows in kinds.items() if rows}
        if not since_s:
            return None
        kind = min(since_s, key=lambda kind: since_s[kind])
        return self.proposal(kind, (voice for _, voice in kinds[kind]))

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> WorkPlan:
        """The plan of a proposal."""
        assert isinstance(proposal, ScheduledStep)
        kind, voices = proposal.kind, proposal.rows
        if kind == "audio":
            size = sum(self._next_frames(voice) for voice in voices)
            return self.plan(step_id, proposal, Operation("audio", len(voices), size))
        if kind == "token":
            return self.plan(step_id, proposal, Operation("token", len(voices), 0))
        size = sum(voice.num_prompt for voice in voices)
        return self.plan(step_id, proposal, Operation("token", 0, size))

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record which requests are ready, and since when."""
        self.costs.observe(plan.kind, {"rows": float(len(self.rows))}, result.elapsed_s)
        self.is_busy = False
        if plan.kind == "audio":
            for voice in self.rows:
                voice.chunk_since_s = math.inf
                self.give(voice, self._next_frames(voice))
                self._note_chunk(voice, now_s)
            return
        for voice in self.rows:
            voice.is_started = True
            voice.num_steps += 1
            voice.since_s = now_s
            self._note_chunk(voice, now_s)

    def _note_chunk(self, voice: _Voice, now_s: float) -> None:
        num_ready = self.ready_frames(voice)
        is_whole = num_ready >= self.chunk_frames(voice) or (voice.is_sampled and num_ready)
        if is_whole and math.isinf(voice.chunk_since_s):
            voice.chunk_since_s = now_s

    def _next_frames(self, voice: _Voice) -> int:
        return min(self.ready_frames(voice), self.chunk_frames(voice))

    def _chunks(self) -> list[tuple[float, _Voice]]:
        voices = self.voices.values()
        return [(v.chunk_since_s, v) for v in voices if math.isfinite(v.chunk_since_s)]

    def _rows(self) -> list[tuple[float, _Voice]]:
        voices = self.voices.values()
        return [(v.since_s, v) for v in voices if v.is_started and not v.is_sampled]

    def _prompts(self) -> list[tuple[float, _Voice]]:
        num_rows, num_tokens, taken = len(self._rows()), 0, []
        for voice in self.voices.values():
            if voice.is_started:
                continue
            num_rows, num_tokens = num_rows + 1, num_tokens + voice.num_prompt
            if num_rows > self.max_rows or (taken and num_tokens > self.max_prompt_tokens):
                break
            taken.append((voice.since_s, voice))
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxOptions:
    """The options of MAX's scheduler; 0 is its default (`min` follows `max`, that the batch)."""

    ce_delay_ms: float = 0.0
    enable_prioritize_first_decode: bool = False
    min_batch_size_tg: int = 0
    max_queue_size_tg: int = 0
    max_batch_input_tokens: int = 2048


class MaxScheduler(_Baseline):
    """Batches of prompts and rounds of chunks in turn."""

    def __init__(
        self, model: SpeechModel, *, chunks: Sequence[int], max_rows: int, options: MaxOptions
    ) -> None:
        super().__init__(model, chunks=chunks, max_rows=max_rows)
        self.options = options
        self.max_queue = options.max_queue_size_tg or max_rows
        self.min_batch = options.min_batch_size_tg or self.max_queue
        self.new: tuple[_Voice, ...] = ()

    def propose(self, now_s: float) -> Proposal | None:
        """Prompts, while there are some and few requests run; else a round of chunks."""
        if self.is_busy:
            return None
        running = [voice for voice in self.voices.values() if voice.is_started]
        pending = [voice for voice in self.voices.values() if not voice.is_started]
        if self.new and self.options.enable_prioritize_first_decode:
            return self.proposal("round", self.new)
        has_room = len(running) < min(self.max_queue, self.max_rows)
        is_low = len(running) < self.min_batch or not running
        if pending and has_room and is_low:
            wait_s = pending[0].job.arrival_s + self.options.ce_delay_ms / 1e3
            proposal = self.proposal("prompt", self._batch(pending, len(running)))
            if running or wait_s <= now_s:
                return proposal
            return replace(proposal, not_before_s=wait_s)
        return self.proposal("round", running) if running else None

    def _batch(self, pending: list[_Voice], num_running: int) -> list[_Voice]:
        num_tokens, taken = 0, []
        for voice in pending[: min(self.max_queue, self.max_rows) - num_running]:
            num_tokens += voice.num_prompt
            if taken and num_tokens > self.options.max_batch_input_tokens:
                break
            taken.append(voice)
        return taken

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> WorkPlan:
        """The plan of a round: as many token steps as its longest chunk, then audio."""
        assert isinstance(proposal, ScheduledStep)
        kind, voices = proposal.kind, proposal.rows
        if kind == "prompt":
            size = sum(voice.num_prompt for voice in voices)
            return self.plan(step_id, proposal, Operation("token", 0, size))
        missing = [self._missing_steps(voice) for voice in voices]
        steps = [
            Operation("token", sum(count > step for count in missing), 0)
            for step in range(max(missing, default=0))
        ]
        size = sum(self._round_frames(voice) for voice in voices)
        return self.plan(step_id, proposal, *steps, Operation("audio", len(voices), size))

    def _round_frames(self, voice: _Voice) -> int:
        num_left = self.model.clock.num_frames(voice.max_steps) - voice.num_frames
        return min(self.chunk_frames(voice), num_left)

    def _missing_steps(self, voice: _Voice) -> int:
        num_frames = voice.num_frames + self._round_frames(voice)
        return max(0, self.model.clock.num_steps(num_frames) - voice.num_steps)

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Send each request the audio of its round."""
        self.costs.observe(plan.kind, {"rows": float(len(self.rows))}, result.elapsed_s)
        self.is_busy = False
        if plan.kind == "prompt":
            self.new = self.rows
            for voice in self.rows:
                voice.is_started, voice.num_steps = True, 1
            return
        self.new = ()
        for voice in self.rows:
            num_frames = self._round_frames(voice)
            voice.num_steps = max(voice.num_steps, voice.num_steps + self._missing_steps(voice))
            self.give(voice, num_frames)

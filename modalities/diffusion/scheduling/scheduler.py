"""Step batching of pictures: many at different steps share the model's runs.

Owns the life of image jobs from submission to their last delta: each of a job's pictures is
encoded, denoised and decoded. Which pictures a step takes is the policy of `denoise_draft`; this
file books what it chose, and records what came of it. Knows no tensors.

Plans overlap: a picture's position is advanced when a step of it is booked, so that its next one
can be booked while that is in flight. What came of a step is recorded when it is over; results of
pictures that have ended meanwhile are dropped. After a step that ran out of memory its pictures are
planned again in smaller steps; those that a later step has already taken on from a place they had
not reached begin anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from triptych.core.errors import InvalidRequest, OutOfMemory, Overloaded, TriptychError, to_info
from triptych.core.job import Job, JobState, Output
from triptych.core.media.pixels import Pixels
from triptych.core.plan import Plan, StepResult
from triptych.modalities.diffusion.plan import (
    DenoisePlan,
    DenoiseStepResult,
    PictureCost,
    PictureRow,
    PictureRowResult,
    PictureStart,
)
from triptych.modalities.diffusion.scheduling.draft import DenoiseDraft, Drafter
from triptych.modalities.diffusion.scheduling.state import (
    DenoiseState,
    DenoiseStep,
    Entry,
    PictureState,
    PictureStatus,
    ScheduledPicture,
)
from triptych.modalities.diffusion.scheduling.step_spans import StepSpan
from triptych.modalities.diffusion.scheduling.times import RunTimes
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest
from triptych.schedulers.base import Proposal, SchedulerStats


@dataclass(frozen=True, slots=True)
class _DenoiseIntent:
    """A draft, and the version of the state it was made from."""

    draft: DenoiseDraft
    version: int


@dataclass(slots=True)
class _Counters:
    num_pictures: int = 0
    num_retries: int = 0
    num_runs: int = 0
    num_rows: int = 0
    num_computed: int = 0
    num_skipped: int = 0


class DenoiseScheduler:
    """Implements `schedulers.base.Scheduler` for `ImageRequest` jobs of one model.

    `measure` says what a request's pictures take, and raises `InvalidRequest` for what the model
    can never draw. `max_pictures` are begun and not over at most, with `max_state_bytes` in sum.
    A run of the model has `max_rows` rows at most, or one picture's.
    """

    def __init__(
        self,
        *,
        model: str,
        measure: Callable[[ImageRequest], PictureCost],
        max_pictures: int,
        max_state_bytes: int,
        max_jobs: int,
        max_rows: int,
    ) -> None:
        self._model = model
        self._measure = measure
        self._max_jobs = max_jobs
        self._state = DenoiseState(max_pictures=max_pictures, max_state_bytes=max_state_bytes)
        self._times = RunTimes(max_rows)
        self._drafter = Drafter(self._state, self._times, max_rows)
        self._counters = _Counters()
        self._num_submitted = 0
        self._version = 0

    # What others ask.

    def submit(self, job: Job) -> None:
        """Queue `job`. Raises InvalidRequest, and Overloaded."""
        request = job.request
        assert isinstance(request, ImageRequest), "the API sends this model image requests"
        assert job.job_id not in self._state.entries, "job ids are unique"
        if request.num_images < 1:
            raise InvalidRequest("Ask for one picture at least.", param="n")
        cost = self._measure(request)
        if cost.state_bytes > self._state.max_state_bytes:
            raise InvalidRequest("A picture of this size does not fit into memory.", param="size")
        if len(self._state.entries) >= self._max_jobs:
            raise Overloaded("The queue is full; try again later.", retry_after_s=1.0)
        self._num_submitted += 1
        entry = Entry(
            job=job,
            request=request,
            cost=cost,
            number=self._num_submitted,
            is_paused=job.is_paused,
        )
        self._state.add(entry)
        self._version += 1
        self._tell_line()

    def cancel(self, job_id: str) -> None:
        """End a job with a last delta that says so; an unknown or ended one is ignored."""
        entry = self._state.entries.get(job_id)
        if entry is not None:
            self._version += 1
            self._end(entry, JobState.CANCELLED, payload=ImageDelta(finish_reason="cancelled"))

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Leave a job out of steps, or let it go on; an unknown or ended one is ignored."""
        entry = self._state.entries.get(job_id)
        if entry is not None:
            self._version += 1
            entry.is_paused = is_paused
            self._tell_line()

    def set_gap(self, gap_s: float) -> None:
        """Where other models have jobs, a step is one guidance branch's, or about so long."""
        self._drafter.gap_s = gap_s

    # What the loop asks.

    def propose(self, now_s: float) -> Proposal | None:
        """The next step. Nobody waits for any one of them: pictures have no due time in the loop.

        A job's deadline orders pictures among themselves.
        """
        draft = self._drafter.draft()
        if draft is None:
            return None
        return Proposal(
            model=self._model,
            kind=draft.kind,
            work=draft.work,
            due_s=math.inf,
            num_rows=len(draft.pictures),
            intent=_DenoiseIntent(draft, self._version),
        )

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Let pictures in, move them on, and make the plan; chooses anew if anything changed."""
        intent = proposal.intent
        assert isinstance(intent, _DenoiseIntent), "a proposal of this scheduler"
        is_fresh = intent.version == self._version
        draft = intent.draft if is_fresh else self._drafter.draft()
        if draft is None:
            return None
        self._version += 1
        state, is_start = self._state, draft.kind == "encode"
        dropped, state.dropped = tuple(state.dropped), []
        size = draft.size
        for picture in draft.passed:
            picture.num_times_passed += 1
        pieces = tuple(self._book_piece(draft, picture, now_s) for picture in draft.pictures)
        state.steps[step_id] = DenoiseStep(draft.kind, pieces, size)
        if is_start:
            self._tell_line()
        return DenoisePlan(
            step_id=step_id,
            model=self._model,
            kind=draft.kind,
            rows=() if is_start else tuple(map(_row, pieces)),
            starts=tuple(map(_start, pieces)) if is_start else (),
            dropped=dropped,
        )

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded, and send it."""
        assert isinstance(result, DenoiseStepResult), "the runner of pictures' result"
        self._version += 1
        step = self._state.steps.pop(plan.step_id)
        self._observe(step, result)
        for piece, row in zip(step.pieces, result.rows, strict=True):
            picture = piece.picture
            picture.num_in_flight -= 1
            if picture.stage is PictureStatus.OVER:
                continue
            if row.error is not None:
                self._end(picture.entry, JobState.FAILED, error=row.error)
            elif step.kind == "encode":
                self._accept_course(picture, row, now_s)
            elif step.kind == "denoise":
                self._accept_stride(piece, row, now_s)
            else:
                self._accept_picture(picture, row, now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        Where it ran out of memory with several pictures, they are tried again in smaller steps.
        """
        self._version += 1
        step = self._state.steps.pop(plan.step_id)
        is_retried = isinstance(error, OutOfMemory) and len(step.pieces) > 1 and step.size > 0
        if is_retried:
            self._state.max_size[step.kind] = step.size / 2
        for piece in step.pieces:
            picture = piece.picture
            picture.num_in_flight -= 1
            if picture.stage is PictureStatus.OVER:
                continue
            if is_retried:
                self._counters.num_retries += 1
                self._state.take_back(piece)
            else:
                self._end(picture.entry, JobState.FAILED, error=error)

    def stats(self) -> SchedulerStats:
        """Counts for metrics: pictures and their memory now, and totals.

        Rows per run is the quotient of `denoise_rows_total` and `denoise_runs_total`.
        """
        state, counters = self._state, self._counters
        num_waiting = sum(1 for _ in state.jobs_in_line)
        return SchedulerStats(
            num_waiting=num_waiting,
            num_running=len(state.entries) - num_waiting,
            gauges={
                "jobs_paused": sum(entry.is_paused for entry in state.entries.values()),
                "pictures_waiting": len(state.waiting),
                "pictures_running": len(state.running),
                "picture_state_bytes": state.state_bytes,
            },
            counters={
                "pictures_total": counters.num_pictures,
                "picture_retries_total": counters.num_retries,
                "denoise_runs_total": counters.num_runs,
                "denoise_rows_total": counters.num_rows,
                "denoise_steps_computed_total": counters.num_computed,
                "denoise_steps_skipped_total": counters.num_skipped,
            },
        )

    def check(self) -> None:
        """Assert that every picture is accounted for."""
        self._state.check()

    # Booking and recording.

    def _book_piece(
        self, draft: DenoiseDraft, picture: PictureState, now_s: float
    ) -> ScheduledPicture:
        """Move a picture on, and note that a step of it is launched."""
        picture.num_in_flight += 1
        match draft.kind:
            case "encode":
                self._state.let_in(picture)
                picture.entry.job.state = JobState.RUNNING
                picture.entry.job.timings.setdefault("scheduled_s", now_s)
            case "decode":
                picture.stage = PictureStatus.DECODING
            case "denoise":
                return _stepping(picture, asks_ahead=draft.asks_ahead)
        return ScheduledPicture(picture)

    def _observe(self, step: DenoiseStep, result: DenoiseStepResult) -> None:
        """Count what ran, and learn how long runs take; sizes share a step's time as foreseen."""
        if step.kind != "denoise":
            return
        rows: Counter[int] = Counter()
        for piece, row in zip(step.pieces, result.rows, strict=True):
            assert piece.stride is not None, "what is denoised takes a stride"
            self._counters.num_computed += row.num_computed
            self._counters.num_skipped += piece.stride.num_steps - row.num_computed
            if row.num_rows:
                rows[piece.picture.num_tokens] += row.num_rows
        foreseen_s = {size: self._times.of(size, num_rows) for size, num_rows in rows.items()}
        for size, num_rows in rows.items():
            self._counters.num_runs += 1
            self._counters.num_rows += num_rows
            share = foreseen_s[size] / sum(foreseen_s.values())
            self._times.observe(size, num_rows, result.elapsed_s * share)

    def _accept_course(self, picture: PictureState, row: PictureRowResult, now_s: float) -> None:
        assert row.course is not None, "encoding tells the way"
        picture.begin(row.course)
        if picture.entry.request.has_progress:
            self._send(picture, now_s)

    def _accept_stride(self, piece: ScheduledPicture, row: PictureRowResult, now_s: float) -> None:
        picture = piece.picture
        assert piece.stride is not None, "what is denoised takes a stride"
        picture.step = piece.stride.stop
        picture.num_computed += row.num_computed
        if row.pixels is not None:
            picture.num_shown = piece.preview + 1
            self._send(picture, now_s, row.pixels, piece.preview)
        elif picture.entry.request.has_progress and not piece.asks_ahead:
            self._send(picture, now_s)

    def _accept_picture(self, picture: PictureState, row: PictureRowResult, now_s: float) -> None:
        assert row.pixels is not None, "decoding yields a picture"
        self._counters.num_pictures += 1
        self._state.widen()
        self._state.finish(picture)
        self._send(picture, now_s, row.pixels)

    def _send(
        self, picture: PictureState, now_s: float, pixels: Pixels | None = None, preview: int = -1
    ) -> None:
        """Tell a job how far one of its pictures is; its last picture ends it."""
        entry, course = picture.entry, picture.course
        assert course is not None, "what is told of is encoded"
        entry.job.timings.setdefault("first_output_s", now_s)
        is_last = all(each.stage is PictureStatus.OVER for each in entry.pictures)
        delta = ImageDelta(
            picture=picture.index,
            step=picture.step,
            num_steps=course.num_steps,
            num_computed=picture.num_computed,
            pixels=pixels,
            partial_index=preview,
            num_prompt_tokens=course.num_prompt_tokens,
            finish_reason="stop" if is_last else None,
        )
        if is_last:
            self._end(entry, JobState.FINISHED, payload=delta)
        else:
            entry.job.sink(Output(job_id=entry.job.job_id, payload=delta))

    def _tell_line(self) -> None:
        """Tell those in line where they stand, if they asked for it and it is news."""
        for position, entry in enumerate(self._state.jobs_in_line):
            is_asked = entry.request.has_progress and not entry.is_paused
            if is_asked and entry.told_position != position:
                entry.told_position = position
                delta = ImageDelta(queue_position=position)
                entry.job.sink(Output(job_id=entry.job.job_id, payload=delta))

    def _end(
        self,
        entry: Entry,
        state: JobState,
        *,
        payload: ImageDelta | None = None,
        error: TriptychError | None = None,
    ) -> None:
        """Send the last output; what the job holds is let go of with the next plan."""
        entry.job.state = state
        self._state.remove(entry)
        info = None if error is None else to_info(error)
        output = Output(job_id=entry.job.job_id, payload=payload, is_final=True, error=info)
        entry.job.sink(output)
        self._tell_line()


def _stepping(picture: PictureState, *, asks_ahead: bool) -> ScheduledPicture:
    """Move a picture through its next stride, or up to the step that computes."""
    stride = picture.stride
    picture.has_asked = asks_ahead
    if asks_ahead:
        skipped = StepSpan(stride.num_steps - 1, stride.stop - 1, 0)
        return ScheduledPicture(picture, skipped, asks_ahead=True)
    picture.num_strides += 1
    return ScheduledPicture(picture, stride, picture.preview_after(picture.num_strides))


def _row(piece: ScheduledPicture) -> PictureRow:
    return PictureRow(
        key=piece.picture.key,
        num_steps=piece.stride.num_steps if piece.stride else 0,
        has_preview=piece.preview >= 0,
        asks_ahead=piece.asks_ahead,
    )


def _start(piece: ScheduledPicture) -> PictureStart:
    return PictureStart(key=piece.picture.key, request=piece.picture.entry.request)

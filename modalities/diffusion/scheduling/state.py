"""What the denoise scheduler knows: jobs, their pictures, and the steps in flight.

Owns the data and its invariants. Decides nothing: `draft` reads it, `scheduler` changes it.
"""

from __future__ import annotations

import enum
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from triptych.modalities.diffusion.plan import PictureCost, PictureKey, PlannedSteps
from triptych.modalities.diffusion.scheduling.step_spans import StepSpan, preview_spans, step_spans
from triptych.modalities.diffusion.wire import ImageRequest
from triptych.schedulers.batcher import BatchedJob, Unit

_GROWTH = 1.05  # by picture, so that want of memory at every turn still lets pictures be done


class PictureStatus(enum.Enum):
    """Where a picture stands, with steps in flight counted as done (but for what they yield)."""

    WAITING = "waiting"
    ENCODING = "encoding"
    DRAWING = "drawing"
    DECODING = "decoding"
    OVER = "over"


@dataclass(slots=True, eq=False)
class ImageJob(BatchedJob):
    """A job. `number` counts jobs as they came; `told_position` is the last that was sent."""

    request: ImageRequest
    cost: PictureCost
    number: int
    told_position: int = -1
    pictures: list[PictureState] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Whether none of its pictures is begun."""
        return all(picture.stage is PictureStatus.WAITING for picture in self.pictures)


@dataclass(slots=True, eq=False, kw_only=True)
class PictureState(Unit):
    """One picture. `num_spans` of its `spans` are done or in flight, `step` steps surely done.

    With `has_asked` one branch of the next span was asked ahead. A picture that has to begin again
    is another one with the same key.
    """

    entry: ImageJob
    index: int
    num_shown: int = 0
    stage: PictureStatus = PictureStatus.WAITING
    planned: PlannedSteps | None = None
    spans: tuple[StepSpan, ...] = ()
    shown_after: tuple[int, ...] = ()
    num_spans: int = 0
    has_asked: bool = False
    step: int = 0
    num_computed: int = 0
    num_times_passed: int = 0

    @property
    def key(self) -> PictureKey:
        """What the runner knows it by."""
        return PictureKey(self.entry.job.job_id, self.index)

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the queue: by job, then by number."""
        return self.entry.number, self.index

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among those of all clients: none has a priority."""
        return 0, self.entry.number

    @property
    def client(self) -> str:
        """Whose it is."""
        return self.entry.job.client

    @property
    def due_s(self) -> float:
        """When its job must be over."""
        deadline_s = self.entry.job.deadline_s
        return math.inf if deadline_s is None else deadline_s

    @property
    def num_left(self) -> int:
        """Spans to go."""
        return len(self.spans) - self.num_spans

    @property
    def span(self) -> StepSpan:
        """The next one, or what is left of it."""
        span = self.spans[self.num_spans]
        return StepSpan(1, span.stop, span.num_rows - 1) if self.has_asked else span

    @property
    def num_rows(self) -> int:
        """Guidance branches that the next span computes."""
        return self.span.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of each branch: pictures with as many share a run."""
        return self.entry.cost.num_tokens

    @property
    def can_go_on(self) -> bool:
        """Whether its next span, or its decoding, may be booked."""
        return self.stage is PictureStatus.DRAWING and not self.entry.is_paused

    def begin(self, planned: PlannedSteps) -> None:
        """Its text is encoded, and its steps are known."""
        self.stage, self.planned, self.step = PictureStatus.DRAWING, planned, planned.first_step
        self.spans = step_spans(planned)
        self.shown_after = preview_spans(self.spans, self.entry.request.num_partials)

    def preview_after(self, num_spans: int) -> int:
        """Which preview is due after so many spans; -1 if none is, or it was shown before."""
        if num_spans - 1 not in self.shown_after:
            return -1
        index = self.shown_after.index(num_spans - 1)
        return index if index >= self.num_shown else -1


@dataclass(frozen=True, slots=True)
class ScheduledPicture:
    """One picture's part of a step; `span` where it is denoised, `preview` if it shows one.

    With `asks_ahead` its span ends before the step that computes, of which one branch is asked.
    """

    unit: PictureState
    span: StepSpan | None = None
    preview: int = -1
    asks_ahead: bool = False


@dataclass(slots=True, kw_only=True)
class DenoiseState:
    """All of it: pictures waiting, those begun, and those the runner is to release.

    `max_size` bounds a step of a kind after one ran out of memory, for a while.
    """

    max_pictures: int
    max_state_bytes: int
    jobs: Mapping[str, ImageJob]
    waiting: list[PictureState] = field(default_factory=list)
    running: dict[PictureState, None] = field(default_factory=dict)
    dropped: list[PictureKey] = field(default_factory=list)
    max_size: dict[str, float] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """What pictures hold between steps."""
        return sum(picture.entry.cost.state_bytes for picture in self.running)

    @property
    def jobs_in_line(self) -> Iterator[ImageJob]:
        """Jobs that have not begun, in order."""
        return (entry for entry in self.jobs.values() if entry.is_waiting)

    def add(self, entry: ImageJob) -> None:
        """Queue a job's pictures."""
        for index in range(entry.request.num_images):
            entry.pictures.append(PictureState(entry=entry, index=index))
        self.waiting += entry.pictures

    def admit(self, picture: PictureState) -> None:
        """Begin a picture."""
        self.waiting.remove(picture)
        self.running[picture] = None
        picture.stage = PictureStatus.ENCODING

    def finish(self, picture: PictureState) -> None:
        """A picture is decoded; the runner has released it. Steps may grow again."""
        del self.running[picture]
        picture.stage = PictureStatus.OVER
        for kind in self.max_size:
            self.max_size[kind] *= _GROWTH

    def remove(self, entry: ImageJob) -> None:
        """Forget a job's pictures, whatever becomes of those in steps in flight."""
        for picture in entry.pictures:
            if picture.stage is PictureStatus.WAITING:
                self.waiting.remove(picture)
            elif picture.stage is not PictureStatus.OVER:
                self._drop(picture)
            picture.stage = PictureStatus.OVER

    def rollback(self, row: ScheduledPicture) -> None:
        """Put a picture back to its place before a step that failed.

        Where a later step of it was in flight too, the runner's place is not known here: the
        picture begins again.
        """
        picture = row.unit
        if picture.num_in_flight:
            self._drop(picture)
            picture.stage = PictureStatus.OVER
            fresh = PictureState(
                entry=picture.entry, index=picture.index, num_shown=picture.num_shown
            )
            picture.entry.pictures[picture.index] = fresh
            insort(self.waiting, fresh, key=_place)
        elif picture.stage is PictureStatus.ENCODING:
            del self.running[picture]
            picture.stage = PictureStatus.WAITING
            insort(self.waiting, picture, key=_place)
        else:
            picture.stage = PictureStatus.DRAWING
            picture.has_asked = False
            if row.span is not None and not row.asks_ahead:
                picture.num_spans -= 1
                picture.has_asked = row.span != picture.span  # it was what was left of it

    def _drop(self, picture: PictureState) -> None:
        del self.running[picture]
        self.dropped.append(picture.key)

    def check(self, rows: Iterable[ScheduledPicture]) -> None:
        """Assert that every picture is accounted for; `rows` are in flight."""
        assert len(self.running) <= self.max_pictures, "more pictures than may run"
        assert self.state_bytes <= self.max_state_bytes, "more state than there is room for"
        assert len(set(self.dropped)) == len(self.dropped), "a picture is dropped once"
        places = [picture.place for picture in self.waiting]
        assert places == sorted(set(places)), "a waiting picture is in the queue once"
        assert all(picture.stage is PictureStatus.WAITING for picture in self.waiting)
        open_pictures = {*self.waiting, *self.running}
        assert len(open_pictures) == len(self.waiting) + len(self.running)
        for entry in self.jobs.values():
            assert not entry.is_done, "a job that ended is forgotten"
            left = {each for each in entry.pictures if each.stage is not PictureStatus.OVER}
            assert left, "a live job has pictures to draw"
            assert left <= open_pictures, "a picture is lost"
            open_pictures -= left
        assert not open_pictures, "a picture belongs to a live job"
        in_flight = [row.unit for row in rows]
        for picture in {*in_flight, *self.running}:
            assert picture.num_in_flight == in_flight.count(picture), "a step in flight is lost"
            assert picture.num_spans <= len(picture.spans)
            is_busy = picture.stage in (PictureStatus.ENCODING, PictureStatus.DECODING)
            assert picture.num_in_flight or not is_busy, "nothing encodes or decodes it"


def _place(picture: PictureState) -> tuple[int, int]:
    return picture.place

"""What the denoise scheduler knows: jobs, their pictures, and the steps in flight.

Owns the data and its invariants. Decides nothing: `denoise_draft` reads it, `denoise` changes it.
"""

from __future__ import annotations

import enum
import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.core.job import Job
from triptych.modalities.diffusion.plan import PictureCost, PictureKey, PlannedSteps
from triptych.modalities.diffusion.scheduling.step_spans import StepSpan, preview_strides, strides
from triptych.modalities.diffusion.wire import ImageRequest

_GROWTH = 1.05  # by picture, so that want of memory at every turn still lets pictures be done


class PictureStatus(enum.Enum):
    """Where a picture stands, with steps in flight counted as done (but for what they tell)."""

    WAITING = "waiting"
    ENCODING = "encoding"
    DRAWING = "drawing"
    DECODING = "decoding"
    OVER = "over"


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A job. `number` counts jobs as they came; `told_position` is the last it was told."""

    job: Job
    request: ImageRequest
    cost: PictureCost
    number: int
    is_paused: bool = False
    told_position: int = -1
    pictures: list[PictureState] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the last output was sent."""
        return self.job.state.is_final

    @property
    def is_waiting(self) -> bool:
        """Whether none of its pictures is begun."""
        return all(picture.stage is PictureStatus.WAITING for picture in self.pictures)


@dataclass(slots=True, eq=False)
class PictureState:
    """One picture. `num_strides` of its `way` are done or in flight, `step` steps surely done.

    With `has_asked` one branch of the next stride was asked ahead. A picture that has to begin anew
    is another one with the same key.
    """

    entry: Entry
    index: int
    num_shown: int = 0
    stage: PictureStatus = PictureStatus.WAITING
    course: PlannedSteps | None = None
    way: tuple[StepSpan, ...] = ()
    shown_after: tuple[int, ...] = ()
    num_strides: int = 0
    has_asked: bool = False
    step: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    num_times_passed: int = 0

    @property
    def key(self) -> PictureKey:
        """What the runner knows it by."""
        return PictureKey(self.entry.job.job_id, self.index)

    @property
    def place(self) -> tuple[int, int]:
        """Its place in line: by job, then by number."""
        return self.entry.number, self.index

    @property
    def due_s(self) -> float:
        """When its job must be over."""
        deadline_s = self.entry.job.deadline_s
        return math.inf if deadline_s is None else deadline_s

    @property
    def num_left(self) -> int:
        """Strides to go."""
        return len(self.way) - self.num_strides

    @property
    def stride(self) -> StepSpan:
        """The next one, or what is left of it."""
        stride = self.way[self.num_strides]
        return StepSpan(1, stride.stop, stride.num_rows - 1) if self.has_asked else stride

    @property
    def num_rows(self) -> int:
        """Guidance branches that the next stride computes."""
        return self.stride.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of each branch: pictures with as many share a run."""
        return self.entry.cost.num_tokens

    @property
    def can_step(self) -> bool:
        """Whether its next stride may be booked."""
        return self._can_go_on and self.num_left > 0

    @property
    def can_decode(self) -> bool:
        """Whether all of its strides are booked, and its decoding is not."""
        return self._can_go_on and self.num_left == 0

    @property
    def _can_go_on(self) -> bool:
        return self.stage is PictureStatus.DRAWING and not self.entry.is_paused

    def begin(self, course: PlannedSteps) -> None:
        """Its text is encoded, and its way known."""
        self.stage, self.course, self.step = PictureStatus.DRAWING, course, course.first_step
        self.way = strides(course)
        self.shown_after = preview_strides(self.way, self.entry.request.num_partials)

    def preview_after(self, num_strides: int) -> int:
        """Which preview is due after so many strides; -1 if none is, or it was shown before."""
        if num_strides - 1 not in self.shown_after:
            return -1
        index = self.shown_after.index(num_strides - 1)
        return index if index >= self.num_shown else -1


@dataclass(frozen=True, slots=True)
class ScheduledPicture:
    """One picture's part of a step; `stride` where it is denoised, `preview` if it shows one.

    With `asks_ahead` its stride ends before the step that computes, of which one branch is asked.
    """

    picture: PictureState
    stride: StepSpan | None = None
    preview: int = -1
    asks_ahead: bool = False


@dataclass(frozen=True, slots=True)
class DenoiseStep:
    """A booked step. `size` is how much it holds at once, in the units of its kind."""

    kind: str
    pieces: tuple[ScheduledPicture, ...]
    size: float


@dataclass(slots=True, kw_only=True)
class DenoiseState:
    """All of it: pictures in line, those begun, and those the runner is to let go of.

    `max_size` bounds a step of a kind after one ran out of memory, for a while.
    """

    max_pictures: int
    max_state_bytes: int
    entries: dict[str, Entry] = field(default_factory=dict)
    waiting: list[PictureState] = field(default_factory=list)
    running: dict[PictureState, None] = field(default_factory=dict)
    dropped: list[PictureKey] = field(default_factory=list)
    steps: dict[int, DenoiseStep] = field(default_factory=dict)
    max_size: dict[str, float] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """What pictures hold between steps."""
        return sum(picture.entry.cost.state_bytes for picture in self.running)

    @property
    def jobs_in_line(self) -> Iterator[Entry]:
        """Jobs of which nothing is begun, first first."""
        return (entry for entry in self.entries.values() if entry.is_waiting)

    def add(self, entry: Entry) -> None:
        """Put a job and its pictures in line."""
        self.entries[entry.job.job_id] = entry
        for index in range(entry.request.num_images):
            entry.pictures.append(PictureState(entry, index))
        self.waiting += entry.pictures

    def let_in(self, picture: PictureState) -> None:
        """Begin a picture."""
        self.waiting.remove(picture)
        self.running[picture] = None
        picture.stage = PictureStatus.ENCODING

    def finish(self, picture: PictureState) -> None:
        """A picture is decoded; the runner has let go of it."""
        del self.running[picture]
        picture.stage = PictureStatus.OVER

    def remove(self, entry: Entry) -> None:
        """Forget a job, whatever becomes of its pictures in steps in flight."""
        del self.entries[entry.job.job_id]
        for picture in entry.pictures:
            if picture.stage is PictureStatus.WAITING:
                self.waiting.remove(picture)
            elif picture.stage is not PictureStatus.OVER:
                self._drop(picture)
            picture.stage = PictureStatus.OVER

    def widen(self) -> None:
        """A picture is done: steps may become larger again, little by little."""
        for kind in self.max_size:
            self.max_size[kind] *= _GROWTH

    def take_back(self, piece: ScheduledPicture) -> None:
        """Let a picture stand where it stood before a step that failed.

        Where it was in a later step already, it took that one from a place that is not known here:
        it begins anew.
        """
        picture = piece.picture
        if picture.num_in_flight:
            self._drop(picture)
            picture.stage = PictureStatus.OVER
            fresh = PictureState(picture.entry, picture.index, num_shown=picture.num_shown)
            picture.entry.pictures[picture.index] = fresh
            self._wait(fresh)
        elif picture.stage is PictureStatus.ENCODING:
            del self.running[picture]
            self._wait(picture)
        else:
            picture.stage = PictureStatus.DRAWING
            picture.has_asked = False
            if piece.stride is not None and not piece.asks_ahead:
                picture.num_strides -= 1
                picture.has_asked = piece.stride != picture.stride  # it was what was left of it

    def _wait(self, picture: PictureState) -> None:
        """Put a picture back at its place in line."""
        picture.stage = PictureStatus.WAITING
        insort(self.waiting, picture, key=lambda each: each.place)

    def _drop(self, picture: PictureState) -> None:
        del self.running[picture]
        self.dropped.append(picture.key)

    def check(self) -> None:
        """Assert that every picture is accounted for."""
        assert len(self.running) <= self.max_pictures, "more pictures than may run"
        assert self.state_bytes <= self.max_state_bytes, "more state than there is room for"
        assert len(set(self.dropped)) == len(self.dropped), "a picture is dropped once"
        places = [picture.place for picture in self.waiting]
        assert places == sorted(set(places)), "who waits stands in line once"
        assert all(picture.stage is PictureStatus.WAITING for picture in self.waiting)
        open_pictures = {*self.waiting, *self.running}
        assert len(open_pictures) == len(self.waiting) + len(self.running)
        for entry in self.entries.values():
            assert not entry.is_done, "a job that ended is forgotten"
            left = {
                picture for picture in entry.pictures if picture.stage is not PictureStatus.OVER
            }
            assert left, "a live job has pictures to draw"
            assert left <= open_pictures, "a picture is lost"
            open_pictures -= left
        assert not open_pictures, "a picture belongs to a live job"
        self._check_steps()

    def _check_steps(self) -> None:
        pieces = [piece.picture for step in self.steps.values() for piece in step.pieces]
        for picture in {*pieces, *self.running}:
            assert picture.num_in_flight == pieces.count(picture), "a step in flight is lost"
            assert picture.num_strides <= len(picture.way)
            is_asked = picture.stage in (PictureStatus.ENCODING, PictureStatus.DECODING)
            assert picture.num_in_flight or not is_asked, "somebody encodes or decodes it"

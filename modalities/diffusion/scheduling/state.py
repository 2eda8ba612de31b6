"""The denoise scheduler's data: jobs, their images, and the steps in flight.

Owns the data and its invariants. Decides nothing: `policy` reads it, `scheduler` changes it.
"""

from __future__ import annotations

import enum
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from triptych.modalities.diffusion.plan import ImageCost, ImageKey, PlannedSteps
from triptych.modalities.diffusion.scheduling.step_spans import StepSpan, preview_spans, step_spans
from triptych.modalities.diffusion.wire import ImageRequest
from triptych.schedulers.batcher import BatchedJob, Unit

_GROWTH = 1.05  # per image, so that images are finished even if memory is always short


class ImageStatus(enum.Enum):
    """The stage of an image, with steps in flight counted as done (except their results)."""

    WAITING = "waiting"
    ENCODING = "encoding"
    GENERATING = "generating"
    DECODING = "decoding"
    OVER = "over"


@dataclass(slots=True, eq=False)
class ImageJob(BatchedJob):
    """A job. `number` is its arrival order; `sent_position` the last queue position sent."""

    request: ImageRequest
    cost: ImageCost
    number: int
    sent_position: int = -1
    images: list[ImageState] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Whether none of its images has begun."""
        return all(image.stage is ImageStatus.WAITING for image in self.images)


@dataclass(slots=True, eq=False, kw_only=True)
class ImageState(Unit):
    """One image. `num_spans` of its `spans` are done or in flight, `step` steps are done.

    Of its tokens, `num_unwritten` are neither written nor in flight.

    With `is_half_evaluated` one guidance branch of the next span was computed ahead. An image that
    has to start again is replaced by a new one with the same key.
    """

    entry: ImageJob
    index: int
    num_shown: int = 0
    stage: ImageStatus = ImageStatus.WAITING
    planned: PlannedSteps | None = None
    spans: tuple[StepSpan, ...] = ()
    shown_after: tuple[int, ...] = ()
    num_spans: int = 0
    num_unwritten: int = 0
    is_half_evaluated: bool = False
    step: int = 0
    num_computed: int = 0
    skipped: list[int] = field(default_factory=list)
    """Steps that a cache skipped, counted from 0."""
    num_times_overtaken: int = 0
    is_interrupted: bool = False

    @property
    def key(self) -> ImageKey:
        """The image's key at the runner."""
        return ImageKey(self.entry.job.job_id, self.index)

    @property
    def place(self) -> tuple[int, int]:
        """The image's place in the queue: by job, then by number."""
        return self.entry.number, self.index

    @property
    def rank(self) -> tuple[int, int]:
        """The image's place among images of all clients: none has a priority."""
        return 0, self.entry.number

    @property
    def client(self) -> str:
        """The client that the job belongs to."""
        return self.entry.job.client

    @property
    def due_s(self) -> float:
        """When the job must be over."""
        deadline_s = self.entry.job.deadline_s
        return math.inf if deadline_s is None else deadline_s

    @property
    def num_left(self) -> int:
        """The number of spans left."""
        return len(self.spans) - self.num_spans

    @property
    def span(self) -> StepSpan:
        """The next span, or the rest of it."""
        span = self.spans[self.num_spans]
        return StepSpan(1, span.stop, span.num_rows - 1) if self.is_half_evaluated else span

    @property
    def num_rows(self) -> int:
        """The number of guidance branches that the next span computes."""
        return self.span.num_rows

    @property
    def num_tokens(self) -> int:
        """The number of tokens per branch: images with the same number share a run."""
        return self.entry.cost.num_tokens

    @property
    def can_step(self) -> bool:
        """Whether its next span, or its decoding, may be booked."""
        return self.stage is ImageStatus.GENERATING and not self.entry.is_paused

    def begin(self, planned: PlannedSteps) -> None:
        """Start denoising an image whose text is encoded and whose steps are known."""
        self.stage, self.planned, self.step = ImageStatus.GENERATING, planned, planned.first_step
        self.spans, self.num_unwritten = step_spans(planned), planned.num_tokens
        self.shown_after = preview_spans(self.spans, self.entry.request.num_partials)

    def interrupt(self) -> None:
        """Leave out the spans that are not in flight: the image is decoded as it is."""
        self.num_spans, self.is_half_evaluated = len(self.spans), False
        self.is_interrupted = True

    def preview_after(self, num_spans: int) -> int:
        """The preview that is due after `num_spans`; -1 if none is or it was shown before."""
        if num_spans - 1 not in self.shown_after:
            return -1
        index = self.shown_after.index(num_spans - 1)
        return index if index >= self.num_shown else -1


@dataclass(frozen=True, slots=True)
class ScheduledImage:
    """One image's part of a step: a `span` if it is denoised, a `preview` if it shows one.

    With `evaluates_ahead` its span ends before the step that computes, and one branch of that step
    is computed ahead. `num_tokens` of it are written.
    """

    unit: ImageState
    span: StepSpan | None = None
    preview: int = -1
    evaluates_ahead: bool = False
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class DenoiseState:
    """Images waiting, images in progress, and images that the runner has to release.

    `max_size` bounds the steps of a kind for a while after one ran out of memory.
    """

    max_images: int
    max_state_bytes: int
    jobs: Mapping[str, ImageJob]
    waiting: list[ImageState] = field(default_factory=list)
    running: dict[ImageState, None] = field(default_factory=dict)
    dropped: list[ImageKey] = field(default_factory=list)
    max_size: dict[str, float] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """The bytes that images hold between steps."""
        return sum(image.entry.cost.state_bytes for image in self.running)

    @property
    def queued_jobs(self) -> Iterator[ImageJob]:
        """Jobs that have not begun, in order."""
        return (entry for entry in self.jobs.values() if entry.is_waiting)

    def add(self, entry: ImageJob) -> None:
        """Queue a job's images."""
        for index in range(entry.request.num_images):
            entry.images.append(ImageState(entry=entry, index=index))
        self.waiting += entry.images

    def admit(self, image: ImageState) -> None:
        """Start a waiting image."""
        self.waiting.remove(image)
        self.running[image] = None
        image.stage = ImageStatus.ENCODING

    def finish(self, image: ImageState) -> None:
        """Remove a decoded image, which the runner has released; steps may grow again."""
        del self.running[image]
        image.stage = ImageStatus.OVER
        for kind in self.max_size:
            self.max_size[kind] *= _GROWTH

    def remove(self, entry: ImageJob) -> None:
        """Remove a job's images, including those in steps in flight."""
        for image in entry.images:
            if image.stage is ImageStatus.WAITING:
                self.waiting.remove(image)
            elif image.stage is not ImageStatus.OVER:
                self._drop(image)
            image.stage = ImageStatus.OVER

    def rollback(self, row: ScheduledImage) -> None:
        """Move an image back to its position before a step that failed.

        If a later step of it was also in flight, the runner's position is unknown: the image starts
        again.
        """
        image = row.unit
        if image.num_in_flight:
            self._drop(image)
            image.stage = ImageStatus.OVER
            fresh = ImageState(entry=image.entry, index=image.index, num_shown=image.num_shown)
            image.entry.images[image.index] = fresh
            insort(self.waiting, fresh, key=_place)
        elif image.stage is ImageStatus.ENCODING:
            del self.running[image]
            image.stage = ImageStatus.WAITING
            insort(self.waiting, image, key=_place)
        else:
            image.stage = ImageStatus.GENERATING
            image.is_half_evaluated = False
            image.num_unwritten += row.num_tokens
            if row.span is not None and not row.evaluates_ahead:
                image.num_spans -= 1
                image.is_half_evaluated = row.span != image.span  # it was the rest of a span

    def _drop(self, image: ImageState) -> None:
        del self.running[image]
        self.dropped.append(image.key)

    def check(self, rows: Iterable[ScheduledImage]) -> None:
        """Assert that every image is accounted for; `rows` are in flight."""
        assert len(self.running) <= self.max_images, "more images than may run"
        assert self.state_bytes <= self.max_state_bytes, "more state than there is room for"
        assert len(set(self.dropped)) == len(self.dropped), "an image is dropped once"
        places = [image.place for image in self.waiting]
        assert places == sorted(set(places)), "a waiting image is in the queue once"
        assert all(image.stage is ImageStatus.WAITING for image in self.waiting)
        open_images = {*self.waiting, *self.running}
        assert len(open_images) == len(self.waiting) + len(self.running)
        for entry in self.jobs.values():
            assert not entry.is_done, "a job that ended is forgotten"
            left = {each for each in entry.images if each.stage is not ImageStatus.OVER}
            assert left, "a live job has images to generate"
            assert left <= open_images, "an image is lost"
            open_images -= left
        assert not open_images, "an image belongs to a live job"
        in_flight = [row.unit for row in rows]
        for image in {*in_flight, *self.running}:
            assert image.num_in_flight == in_flight.count(image), "a step in flight is lost"
            assert image.num_spans <= len(image.spans)
            is_busy = image.stage in (ImageStatus.ENCODING, ImageStatus.DECODING)
            assert image.num_in_flight or not is_busy, "nothing encodes or decodes it"


def _place(image: ImageState) -> tuple[int, int]:
    return image.place

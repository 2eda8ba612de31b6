"""Chat with images: when images are encoded, and how far prompts are computed before that.

Owns the encode steps of a vision model, in addition to its token steps. A prompt's chunk ends at
the first image without features; only images that the next chunks need are encoded. Features live
in a `ContentCache` that the runner fills; a job holds references from its first need of an image
until the image's last position is computed. Encode steps and token steps alternate, so that neither
waits for long. Images may be encoded by another engine (`fetching`). Knows no tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from triptych.core.engine_api.job import Job, JobState, Output, Sink
from triptych.core.engine_api.plan import Plan
from triptych.core.engine_api.prompt_content import ContentSpan, PromptContent
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions
from triptych.core.process.content_cache import ContentCache
from triptych.modalities.vlm.plan import EncodePlan
from triptych.modalities.vlm.scheduling.fetching import ImageExchange
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.batcher import Unit
from triptych.schedulers.executors import Post
from triptych.schedulers.tokens.scheduler import TokenScheduler
from triptych.schedulers.tokens.state import SequenceState
from triptych.schedulers.tokens.step import TokenLimits, TokenStep

_ENCODE = "encode"
_MAX_WAITING_JOBS = 8  # jobs not begun whose images are encoded ahead
_MAX_LOOKAHEAD = 128  # waiting jobs, with or without images, that are searched for them
_PATCH_VALUES = 14 * 14 * 3  # of most vision towers; assumed for all


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLimits:
    """Bounds of one step of a vision model.

    A step encodes images of `max_step_patches` in sum, or one. With `whole_spans` the positions of
    an image are computed in one step, since they attend to each other; with `whole_prompts`, all of
    a prompt with images.
    """

    max_step_patches: int
    whole_spans: bool = False
    whole_prompts: bool = False

    def chunk_end(self, spans: Iterable[ContentSpan], num_prompt_tokens: int, chunk: range) -> int:
        """Where a chunk of a prompt ends without cutting a span or a whole prompt.

        At `chunk.stop`, or where the span begins that it would cut, or else where that span ends.
        """
        start, end = chunk.start, chunk.stop
        if self.whole_prompts:
            return max(end, num_prompt_tokens)
        for first, length in (run for span in spans for run in span.runs if self.whole_spans):
            if first < end < first + length:
                return first if first > start else first + length
        return end


@dataclass(frozen=True, slots=True)
class VisionResources:
    """The cache of features, and the bounds of a step."""

    features: ContentCache[Any]
    limits: VisionLimits


@dataclass(slots=True, eq=False)
class ImagedPrompt:
    """A job's prompt, with references to the features of `refs`.

    Images in `awaited` were encoded for it; another engine was asked for those in `requested`.
    """

    row: SequenceState
    refs: set[bytes] = field(default_factory=set)
    awaited: set[bytes] = field(default_factory=set)
    requested: set[bytes] = field(default_factory=set)

    @property
    def images(self) -> tuple[PromptContent, ...]:
        """The images of the prompt."""
        return self.row.request.contents

    @property
    def num_cached(self) -> int:
        """The number of images found in the cache, or wholly within cached pages."""
        return sum(image.span.digest not in self.awaited for image in self.images)


@dataclass(slots=True, eq=False, kw_only=True)
class _EncodeRow(Unit):
    """An image in an encode step."""

    image: PromptContent

    @property
    def digest(self) -> bytes:
        return self.image.span.digest


class VisionScheduler(TokenScheduler):
    """Schedules the `TokenRequest` jobs of one vision model."""

    _takes_content = True

    def __init__(
        self,
        *,
        model: str,
        pool: PagePool,
        options: ScheduleOptions,
        max_length: int,
        namespace: bytes,
        vision: VisionResources,
    ) -> None:
        super().__init__(
            model=model, pool=pool, options=options, max_length=max_length, namespace=namespace
        )
        self._features = vision.features
        self._vision = vision.limits
        self.limits = TokenLimits(chunk_end=self._chunk_end)
        self._prompts: dict[str, ImagedPrompt] = {}
        self._encoding: set[bytes] = set()
        self._retry_alone: set[bytes] = set()
        self._releasing: list[tuple[int, set[bytes]]] = []
        self.image_exchange = ImageExchange()
        """Fetches images encoded by other engines; set before jobs come."""
        self._was_encode = False
        self._counters.update({"images_encoded_total": 0, "vision_cache_hits_total": 0})

    def connect(self, post: Post) -> None:
        """As for text; also register for fetched images."""
        super().connect(post)
        self.image_exchange.connect(post, self._take_fetched)

    def note_change(self) -> None:
        """As for text; also request images that are needed now, as after a failed page fetch."""
        super().note_change()
        self._take_references()

    def stats(self) -> SchedulerStats:
        """As for text; also counts of fetched images."""
        return self.image_exchange.add_stats(super().stats())

    def check(self) -> None:
        """Assert that every page, slot, row and reference is accounted for."""
        super().check()
        self._features.check()
        assert self._prompts.keys() <= self._jobs.keys()
        assert not self._releasing or self._steps, "references of ended jobs"
        num_held = sum(len(job.refs) for job in self._prompts.values())
        num_held += sum(len(digests) for _, digests in self._releasing)
        if not self._encoding:
            assert num_held == self._features.num_references, "a reference is lost"

    # Jobs.

    def _open(self, job: Job) -> SequenceState:
        if self._vision.whole_prompts and not job.request.contents:
            raise InvalidRequest("This model needs an image with every prompt.", param="messages")
        return super()._open(job)

    def _on_submit(self, opened: SequenceState) -> None:
        super()._on_submit(opened)
        if opened.request.contents:
            prompt = self._prompts[opened.name] = ImagedPrompt(opened)
            job = opened.job
            job.sink, job.feed = (partial(_send, prompt, sink) for sink in (job.sink, job.feed))
            self._take_references()

    def _on_pause(self, opened: SequenceState) -> None:
        super()._on_pause(opened)
        self._take_references()

    def _counts_of(self, opened: SequenceState) -> Mapping[str, int]:
        counts, prompt = super()._counts_of(opened), self._prompts.get(opened.name)
        if prompt is None:
            return counts
        return {**counts, "images": len(prompt.images), "cached_images": prompt.num_cached}

    def _on_end(self, opened: SequenceState) -> None:
        super()._on_end(opened)
        prompt = self._prompts.pop(opened.name, None)
        if prompt is not None:
            # A step in flight may still read features that the job held.
            self._releasing.append((max(self._steps, default=-1), prompt.refs))
            for digest in {image.span.digest for image in prompt.images}:
                if self.image_exchange.is_coming(digest) and not self._waiting_for(digest):
                    self.image_exchange.stop(digest)
        self._update_references()

    def _gauges(self) -> dict[str, float]:
        return {
            **super()._gauges(),
            "vision_cache_entries": len(self._features),
            "vision_cache_bytes": self._features.num_bytes,
        }

    # Policy.

    def _choose_step(self, now_s: float) -> TokenStep | None:
        """A token step or an encode step, alternating where there are both."""
        step = super()._choose_step(now_s)
        if not self._prompts:
            return step
        encode = self._encode_step(is_shared=step is not None)
        if encode is None or step is None:
            return encode or step
        return step if self._was_encode else encode

    def _chunk_end(self, row: SequenceState, start: int, end: int) -> int:
        """Where a chunk ends: before an image without features, never inside a whole span."""
        prompt = self._prompts.get(row.name)
        if prompt is None or start >= row.num_prompt_tokens:
            return end
        spans = [image.span for image in prompt.images]
        blocked = (s.start for s in spans if s.end > start and s.digest not in prompt.refs)
        limit = max(start, min(blocked, default=sys.maxsize))
        if self._vision.whole_prompts and limit < sys.maxsize:
            return start
        chunk = range(start, min(end, limit))
        return self._vision.chunk_end(spans, row.num_prompt_tokens, chunk) if chunk else start

    def _missing_images(self, prompt: ImagedPrompt) -> Iterator[PromptContent]:
        """Images that the prompt's next chunk may need and that it has no reference to."""
        start = self.tokens.num_covered(prompt.row)
        last = start + self._options.max_batch_input_tokens
        if self._vision.whole_prompts or not self._options.enable_chunked_prefill:
            last = prompt.row.num_prompt_tokens
        for image in prompt.images:
            span = image.span
            if span.end > start and span.start < last and span.digest not in prompt.refs:
                yield image

    def _next_prompts(self) -> Iterator[ImagedPrompt]:
        """Prompts whose images may be needed next: those begun, and the first waiting ones."""
        for prompt in self._prompts.values():
            row = prompt.row
            if row.lease is not None and row.num_booked < row.num_prompt_tokens:
                yield prompt
        waiting = (self._prompts.get(r.name) for r in islice(self._state.waiting, _MAX_LOOKAHEAD))
        yield from islice(filter(None, waiting), _MAX_WAITING_JOBS)

    def _encode_step(self, *, is_shared: bool) -> TokenStep | None:
        """The next images to encode; a short step while other work waits for the device."""
        chosen: dict[bytes, PromptContent] = {}
        due_s, num_patches = math.inf, 0
        most, budget_s = self._vision.max_step_patches, self._step_budget_s
        if is_shared and self._options.max_step_s:
            budget_s = min(budget_s, self._options.max_step_s)
        if math.isfinite(budget_s):
            most = min(most, self.costs.work_within(_ENCODE, "patches", budget_s, most))
        for prompt in self._next_prompts():
            for image in self._missing_images(prompt):
                digest = image.span.digest
                is_coming = digest in self._encoding or self.image_exchange.is_coming(digest)
                if digest in chosen or is_coming:
                    continue
                if chosen and num_patches + num_patches_of(image) > most:
                    continue
                if chosen and (digest in self._retry_alone or self._retry_alone & chosen.keys()):
                    continue
                chosen[digest] = image
                num_patches += num_patches_of(image)
                due_s = min(due_s, prompt.row.arrival_s + self._options.target_first_token_s)
        if not chosen:
            return None
        rows = [_EncodeRow(image=image) for image in chosen.values()]
        return TokenStep(kind=_ENCODE, work={"patches": num_patches}, rows=rows, due_s=due_s)

    # Steps.

    def _book_step(self, step: TokenStep, step_id: int, now_s: float) -> tuple[Plan, Sequence[Any]]:
        self._was_encode = step.kind == _ENCODE
        if not self._was_encode:
            taken = super()._book_step(step, step_id, now_s)
        else:
            self._encoding.update(row.digest for row in step.rows)
            images = tuple(row.image for row in step.rows)
            plan = EncodePlan(step_id=step_id, model=self._model, kind=_ENCODE, images=images)
            taken = plan, step.rows
        self._update_references()
        return taken

    def _parts_of(self, step: TokenStep) -> Iterator[tuple[Job, str]]:
        if step.kind != _ENCODE:
            yield from super()._parts_of(step)
            return
        for row in step.rows:
            yield from ((each.row.job, _ENCODE) for each in self._waiting_for(row.digest))

    def _is_void(self, row: Any) -> bool:
        return not isinstance(row, _EncodeRow) and super()._is_void(row)

    def _accept(self, step: TokenStep, row: Any, found: Any, now_s: float) -> None:
        """Record an encoded image, or the result of a token row."""
        if not isinstance(row, _EncodeRow):
            super()._accept(step, row, found, now_s)
            return
        self._retry_alone.discard(row.digest)
        if found is not None:
            self._fail_row(row, found)
            return
        self._counters["images_encoded_total"] += 1
        self._share_reference(row.digest)

    def _take_fetched(self, digest: bytes, is_here: bool) -> None:
        """React to the end of an image's fetch; `is_here` if its features are cached."""
        if is_here:
            self._share_reference(digest)
        self.note_change()

    def _share_reference(self, digest: bytes) -> None:
        """Give references to a new image to the jobs that wait for it."""
        for prompt in self._waiting_for(digest):
            self._features.acquire(digest)
            prompt.refs.add(digest)
            prompt.awaited.add(digest)
        self._features.release(digest)

    def _retry(self, step: TokenStep, live: list[Any], later: Iterable[Any]) -> bool:
        if step.kind != _ENCODE:
            return super()._retry(step, live, later)
        self._retry_alone.update(row.digest for row in live)
        return True

    def _fail_row(self, row: Any, error: TriptychError) -> None:
        """End a row's job, or every job that waits for an image that cannot be encoded."""
        if not isinstance(row, _EncodeRow):
            super()._fail_row(row, error)
            return
        for prompt in self._waiting_for(row.digest):
            self._end(prompt.row, JobState.FAILED, error=error)

    def _settle(self, row: Any) -> None:
        if isinstance(row, _EncodeRow):
            self._encoding.discard(row.digest)
        else:
            super()._settle(row)

    def _waiting_for(self, digest: bytes) -> list[ImagedPrompt]:
        return [
            prompt
            for prompt in self._prompts.values()
            if any(image.span.digest == digest for image in self._missing_images(prompt))
        ]

    # References.

    def _on_step_end(self, now_s: float) -> None:
        super()._on_step_end(now_s)
        self._update_references()

    def _update_references(self) -> None:
        """Release references that are not needed any more, and take those that are available."""
        for prompt in self._prompts.values():
            if not prompt.refs:  # as of most rows that are being answered
                continue
            num_committed = prompt.row.num_committed
            needed = {p.span.digest for p in prompt.images if p.span.end > num_committed}
            self._release(prompt.refs - needed)
            prompt.refs &= needed
        first = min(self._steps, default=sys.maxsize)
        for last, digests in self._releasing:
            if last < first:
                self._release(digests)
        self._releasing = [(last, digests) for last, digests in self._releasing if last >= first]
        self._take_references()

    def _take_references(self) -> None:
        for prompt in self._next_prompts():
            for image in self._missing_images(prompt):
                digest = image.span.digest
                if digest in self._encoding or self.image_exchange.is_coming(digest):
                    continue  # references are shared when its features are cached
                if self._features.acquire(digest) is not None:
                    prompt.refs.add(digest)
                    self._counters["vision_cache_hits_total"] += 1
                elif digest not in prompt.requested:
                    self._request_image(prompt, image)

    def _request_image(self, prompt: ImagedPrompt, image: PromptContent) -> None:
        """Fetch an image, unless its fetch failed for a job that still waits."""
        digest = image.span.digest
        is_new = not any(digest in other.requested for other in self._waiting_for(digest))
        prompt.requested.add(digest)
        if is_new:
            self.image_exchange.start(image)

    def _release(self, digests: set[bytes]) -> None:
        for digest in digests:
            self._features.release(digest)


def _send(prompt: ImagedPrompt, sink: Sink, output: Output) -> None:
    """Send a job's output, with the number of its cached images."""
    delta = output.payload
    if isinstance(delta, TokenDelta):
        delta.num_cached_contents = prompt.num_cached
    sink(output)


def num_patches_of(image: PromptContent) -> int:
    """The work of encoding an image: the encoder's input, in patches."""
    num_values = max(math.prod(array.shape) for array in image.inputs.values())
    return max(1, num_values // _PATCH_VALUES)

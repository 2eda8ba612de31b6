"""Chat with pictures: which are encoded when, and how far prompts get before they are.

Owns the steps of a model that sees. Prompts and answers are jobs of a `TokenScheduler`; this file
holds a prompt's chunk back at the first picture that has no features yet, and proposes to encode
what the next chunks need, no more. Features live in a `ContentCache` that the runner fills; what
is held here are references, from a job's first need of a picture until its last position is
computed. Steps that encode and steps of tokens take turns, so that neither waits for long.
Knows no tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from triptych.core.config import ScheduleOptions
from triptych.core.content_cache import ContentCache
from triptych.core.errors import InvalidRequest, OutOfMemory, TriptychError
from triptych.core.job import Job, JobState, Output, Sink
from triptych.core.plan import Plan, StepResult
from triptych.core.prompt_content import ContentSpan, PromptContent
from triptych.core.tokens import TokenDelta, TokenRequest
from triptych.modalities.vlm.plan import EncodePlan, EncodeStepResult
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.token import TokenScheduler
from triptych.schedulers.token_draft import TokenLimits
from triptych.schedulers.token_pace import ChunkPace

_MAX_WAITING_JOBS = 8  # jobs that have not begun whose pictures are encoded ahead
_MAX_LOOKAHEAD = 128  # waiting jobs, of text too, among which they are looked for
_PATCH_VALUES = 14 * 14 * 3  # of most towers; others' are counted as if they were like it


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLimits:
    """What a model sees at once.

    A step encodes pictures of `max_step_patches` together, or one. `whole_spans`: what a picture
    fills is computed in one go, since its positions see each other; `whole_prompts`: so is the
    prompt of a request with pictures.
    """

    max_step_patches: int
    whole_spans: bool = False
    whole_prompts: bool = False

    def chunk_end(self, spans: Iterable[ContentSpan], num_prompt_tokens: int, chunk: range) -> int:
        """Where a chunk of a prompt ends so as not to cut what is whole.

        At `chunk.stop`, or where the span begins that it would cut, or else where that ends.
        """
        start, end = chunk.start, chunk.stop
        if self.whole_prompts:
            return max(end, num_prompt_tokens)
        for first, length in (run for span in spans for run in span.runs if self.whole_spans):
            if first < end < first + length:
                return first if first > start else first + length
        return end


@dataclass(slots=True, eq=False)
class _VisionJob:
    """A job with pictures: it has references to `held`, and had `awaited` encoded for it."""

    job: Job
    pictures: tuple[PromptContent, ...]
    num_prompt_tokens: int
    held: set[bytes] = field(default_factory=set)
    awaited: set[bytes] = field(default_factory=set)

    @property
    def num_cached(self) -> int:
        """Pictures that were in the cache, or wholly within cached pages."""
        return sum(picture.span.digest not in self.awaited for picture in self.pictures)


@dataclass(frozen=True, slots=True)
class _Encode:
    """The intent of a proposal to encode."""

    digests: tuple[bytes, ...]


class VisionScheduler:
    """Implements `schedulers.base.Scheduler` for `TokenRequest` jobs of one model that sees."""

    def __init__(
        self,
        *,
        model: str,
        tokens: TokenScheduler,
        features: ContentCache[Any],
        sight: VisionLimits,
        options: ScheduleOptions,
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._features = features
        self._sight = sight
        self._options = options
        self._hold = TokenLimits(chunk_end=self._chunk_end)
        self._looks: dict[str, _VisionJob] = {}
        self._encoding: set[bytes] = set()
        self._alone: set[bytes] = set()
        self._in_flight: list[int] = []
        self._fading: list[tuple[int, set[bytes]]] = []
        self._pace = ChunkPace(options.max_step_s)
        self._has_company = False
        self._was_encode = False
        self._num_encoded = self._num_hits = 0

    # What others ask.

    def submit(self, job: Job) -> None:
        """Queue `job`. Raises InvalidRequest, ContextLengthExceeded or Overloaded."""
        request = job.request
        assert isinstance(request, TokenRequest), "the API sends this model token requests"
        if self._sight.whole_prompts and not request.contents:
            raise InvalidRequest("This model needs a picture with every prompt.", param="messages")
        self._tokens.submit(job)
        if request.contents:
            num_prompt_tokens = len(request.prompt_ids)
            look = _VisionJob(job, request.contents, num_prompt_tokens)
            job.sink = partial(_send, look, job.sink)
            self._looks[job.job_id] = look
            self._settle()

    def cancel(self, job_id: str) -> None:
        """End a job with a last delta that says so; an unknown or ended one is ignored."""
        self._tokens.cancel(job_id)
        self._settle()

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Leave a job out of steps, or let it go on; an unknown or ended one is ignored."""
        self._tokens.set_paused(job_id, is_paused)

    def set_gap(self, gap_s: float) -> None:
        """Where other models have jobs, steps are short."""
        self._has_company = math.isfinite(gap_s)
        self._tokens.set_gap(gap_s)

    def propose(self, now_s: float) -> Proposal | None:
        """A step of tokens or one that encodes, in turns where there are both."""
        if not self._looks:
            return self._tokens.propose(now_s)
        step = self._tokens.propose(now_s, self._hold)
        encode = self._propose_encode(is_shared=self._has_company or step is not None)
        if encode is None or step is None:
            return encode or step
        return step if self._was_encode else encode

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Take what the step needs and make the plan; chooses anew if anything changed since."""
        plan: Plan | None
        if isinstance(proposal.intent, _Encode):
            plan = self._book_encode(proposal.intent, step_id)
        else:
            plan = self._tokens.book(proposal, step_id, now_s)
        if plan is not None:
            self._was_encode = isinstance(plan, EncodePlan)
            self._in_flight.append(step_id)
            self._settle()
        return plan

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded."""
        self._in_flight.remove(plan.step_id)
        if isinstance(plan, EncodePlan):
            self._commit_encode(plan, result)
        else:
            self._tokens.commit(plan, result, now_s)
        self._settle()

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        Where memory ran out over several pictures, each is tried once more alone.
        """
        self._in_flight.remove(plan.step_id)
        if not isinstance(plan, EncodePlan):
            self._tokens.fail(plan, error, now_s)
        else:
            digests = {picture.span.digest for picture in plan.pictures}
            self._encoding -= digests
            if isinstance(error, OutOfMemory) and len(digests) > 1:
                self._alone |= digests
            else:
                for digest in digests:
                    self._abort(digest, error)
        self._settle()

    def stats(self) -> SchedulerStats:
        """Counts for metrics: those of tokens, and of pictures."""
        stats = self._tokens.stats()
        gauges = {
            "vision_cache_entries": len(self._features),
            "vision_cache_bytes": self._features.num_bytes,
        }
        counters = {
            "pictures_encoded_total": self._num_encoded,
            "vision_cache_hits_total": self._num_hits,
        }
        return replace(
            stats, gauges={**stats.gauges, **gauges}, counters={**stats.counters, **counters}
        )

    def check(self) -> None:
        """Assert that every page, slot, row and reference is accounted for."""
        self._tokens.check()
        self._features.check()
        assert all(self._tokens.num_committed(job_id) is not None for job_id in self._looks)
        assert not self._fading or self._in_flight, "references of jobs that are over"
        held = sum(len(look.held) for look in self._looks.values())
        fading = sum(len(digests) for _, digests in self._fading)
        if not self._encoding:
            assert held + fading == self._features.num_references, "a reference is lost"

    # Policy.

    def _chunk_end(self, job_id: str, start: int, end: int) -> int:
        """Where a chunk ends: before a picture without features, and never inside what is whole."""
        look = self._looks.get(job_id)
        if look is None or start >= look.num_prompt_tokens:
            return end
        spans = [picture.span for picture in look.pictures]
        blocked = (s.start for s in spans if s.end > start and s.digest not in look.held)
        limit = max(start, min(blocked, default=sys.maxsize))
        if self._sight.whole_prompts and limit < sys.maxsize:
            return start
        chunk = range(start, min(end, limit))
        return self._sight.chunk_end(spans, look.num_prompt_tokens, chunk) if chunk else start

    def _wanted(self, look: _VisionJob) -> Iterator[PromptContent]:
        """Pictures that the job's next chunk may need and that it has no reference to."""
        start = self._tokens.num_covered(look.job.job_id)
        last = start + self._options.max_batch_input_tokens
        if self._sight.whole_prompts or not self._options.enable_chunked_prefill:
            last = look.num_prompt_tokens
        for picture in look.pictures:
            span = picture.span
            if span.end > start and span.start < last and span.digest not in look.held:
                yield picture

    def _next_looks(self) -> Iterator[_VisionJob]:
        """Jobs whose pictures may be needed next: those that run, and the first that wait."""
        for look in self._looks.values():
            if look.job.state is not JobState.WAITING:
                yield look
        waiting = self._tokens.waiting_ids(_MAX_LOOKAHEAD)
        looks = (self._looks[job_id] for job_id in waiting if job_id in self._looks)
        yield from islice(looks, _MAX_WAITING_JOBS)

    # Encoding.

    def _propose_encode(self, *, is_shared: bool) -> Proposal | None:
        """As many pictures as share a step; a short one where others wait for the device."""
        chosen: dict[bytes, PromptContent] = {}
        due_s, num_patches = math.inf, 0
        most = self._sight.max_step_patches
        if is_shared:
            most = min(most, self._pace.max_tokens)
        for look in self._next_looks():
            for picture in self._wanted(look):
                span = picture.span
                if span.digest in chosen or span.digest in self._encoding:
                    continue
                if chosen and num_patches + _num_patches(picture) > most:
                    continue
                if chosen and (span.digest in self._alone or self._alone & chosen.keys()):
                    continue
                chosen[span.digest] = picture
                num_patches += _num_patches(picture)
                due_s = min(due_s, look.job.arrival_s + self._options.target_first_token_s)
        if not chosen:
            return None
        return Proposal(
            model=self._model,
            kind="encode",
            work={"pictures": len(chosen), "patches": num_patches},
            due_s=due_s,
            num_rows=len(chosen),
            intent=_Encode(tuple(chosen)),
        )

    def _book_encode(self, intent: _Encode, step_id: int) -> EncodePlan | None:
        wanted = {p.span.digest: p for look in self._next_looks() for p in self._wanted(look)}
        pictures = tuple(
            wanted[digest]
            for digest in intent.digests
            if digest in wanted and digest not in self._encoding
        )
        if not pictures:
            return None
        self._encoding.update(picture.span.digest for picture in pictures)
        return EncodePlan(step_id=step_id, model=self._model, kind="encode", pictures=pictures)

    def _commit_encode(self, plan: EncodePlan, result: StepResult) -> None:
        """Pass each picture's reference on to whoever waits for it."""
        assert isinstance(result, EncodeStepResult), "the encoder's result"
        self._pace.observe(sum(map(_num_patches, plan.pictures)), result.elapsed_s)
        for picture, error in zip(plan.pictures, result.errors, strict=True):
            digest = picture.span.digest
            self._encoding.remove(digest)
            self._alone.discard(digest)
            if error is not None:
                self._abort(digest, error)
                continue
            self._num_encoded += 1
            for look in self._looks.values():
                if any(wanted.span.digest == digest for wanted in self._wanted(look)):
                    self._features.acquire(digest)
                    look.held.add(digest)
                    look.awaited.add(digest)
            self._features.release(digest)

    def _abort(self, digest: bytes, error: TriptychError) -> None:
        """End every job that waits for a picture which cannot be encoded."""
        for job_id, look in tuple(self._looks.items()):
            if digest in {picture.span.digest for picture in self._wanted(look)}:
                self._tokens.abort(job_id, error)
        self._let_go()

    # References.

    def _settle(self) -> None:
        """After any change: let go of what is not needed any more, take what is there already."""
        self._let_go()
        for look in self._next_looks():
            for picture in self._wanted(look):
                if self._features.acquire(picture.span.digest) is not None:
                    look.held.add(picture.span.digest)
                    self._num_hits += 1

    def _let_go(self) -> None:
        for job_id, look in tuple(self._looks.items()):
            num_committed = self._tokens.num_committed(job_id)
            if num_committed is None:
                del self._looks[job_id]
                self._fading.append((max(self._in_flight, default=-1), look.held))
                continue
            needed = {p.span.digest for p in look.pictures if p.span.end > num_committed}
            self._release(look.held - needed)
            look.held &= needed
        # A step in flight may still read what its jobs held.
        first = min(self._in_flight, default=sys.maxsize)
        for last, digests in self._fading:
            if last < first:
                self._release(digests)
        self._fading = [(last, digests) for last, digests in self._fading if last >= first]

    def _release(self, digests: set[bytes]) -> None:
        for digest in digests:
            self._features.release(digest)


def _send(look: _VisionJob, sink: Sink, output: Output) -> None:
    """Pass on what a job yields, and say how many of its pictures were found."""
    delta = output.payload
    if isinstance(delta, TokenDelta):
        delta = msgspec.structs.replace(delta, num_cached_contents=look.num_cached)
        output = msgspec.structs.replace(output, payload=delta)
    sink(output)


def _num_patches(picture: PromptContent) -> int:
    """How much work it is to encode: what an encoder takes in, in patches."""
    num_values = max(math.prod(array.shape) for array in picture.inputs.values())
    return max(1, num_values // _PATCH_VALUES)

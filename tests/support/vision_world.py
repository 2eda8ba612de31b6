"""A token model with vision that computes nothing: it knows what pages and features should hold.

`SeeingRunner` checks on every step that the features of each image position it computes are
there and referenced, that no chunk cuts what is whole, and (as `token_world` does for text) that
what a row reads is its own past: here also where ids of different images are equal.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from support.driver import SchedulerDriver
from support.token_driver import Driver, random_request
from support.token_world import MODEL, NAMESPACE, ExpectedTokens, ShadowRunner, World, token_request
from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.plan import Plan, StepResult, TokenPlan, TokenRow
from triptych.core.engine_api.prompt_content import Array, ContentSpan, PromptContent
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import InvalidRequest, OutOfMemory, TriptychError
from triptych.core.process.content_cache import ContentCache
from triptych.modalities.vlm.plan import EncodePlan
from triptych.modalities.vlm.scheduling.prompts import (
    VisionLimits,
    VisionResources,
    VisionScheduler,
)
from triptych.schedulers.base import Proposal

CLASH = FIRST_FRAME_ID + 1
"""The id of every image position here, whatever the image."""


def patches(number: int) -> Array:
    """As many, of no content."""
    return Array("uint8", (number, 14 * 14 * 3), b"")


def see(*parts: int | tuple[str, int], **options: object) -> TokenRequest:
    """A prompt of so many text tokens, and (image, number of positions) between them."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids += [index % 7 for index in range(part)]
            continue
        name, length = part
        digest = hashlib.sha256(f"{name}{length}".encode()).digest()
        span = ContentSpan(digest=digest, runs=((len(ids), length),))
        images.append(PromptContent(span=span, inputs={"pixel_values": patches(length)}))
        ids += [CLASH] * length
    plain = token_request(tuple(ids), **options)  # type: ignore[arg-type]
    return TokenRequest(
        prompt_ids=plain.prompt_ids,
        sampling=plain.sampling,
        tenant=plain.tenant,
        contents=tuple(images),
    )


class ExpectedVisionTokens(ExpectedTokens):
    """What a position holds depends on the image it belongs to."""

    def extend(self, num_tokens: int) -> None:
        for position in range(len(self.digests), num_tokens):
            super().extend(position + 1)
            for image in self.request.contents:
                if image.span.start <= position < image.span.end:
                    seen = self.digests[-1] + image.span.digest
                    self.digests[-1] = hashlib.blake2b(seen, digest_size=12).digest()


class ShadowVisionRunner(ShadowRunner):
    """Runs token plans as `ShadowRunner`, and puts the features of images into `features`."""

    def __init__(
        self,
        *,
        features: ContentCache[str],
        limits: VisionLimits,
        num_pages: int,
        page_size: int,
        requests: dict[str, TokenRequest],
    ) -> None:
        super().__init__(num_pages=num_pages, page_size=page_size, requests=requests)
        self.features = features
        self.limits = limits
        self.encoded: list[bytes] = []
        self.bad_images: set[bytes] = set()

    def encode(self, plan: EncodePlan) -> StepResult:
        digests = [image.span.digest for image in plan.images]
        assert digests, "a plan encodes something"
        assert len(set(digests)) == len(digests), "an image is encoded twice"
        num_patches = sum(image.span.num_features for image in plan.images)
        assert len(digests) == 1 or num_patches <= self.limits.max_step_patches
        errors: list[TriptychError | None] = []
        for digest in digests:
            assert self.features.acquire(digest) is None, "it was known"
            if digest in self.bad_images:
                errors.append(InvalidRequest("It does not fit."))
                continue
            self.features.insert(digest, "features", 10)
            self.encoded.append(digest)
            errors.append(None)
        return StepResult(rows=tuple(errors))

    def _run_row(self, row: TokenRow, step_id: int) -> TokenDelta:
        request = self.requests[row.job_id]
        self.stories.setdefault(row.job_id, ExpectedVisionTokens(request))
        end = row.start + row.num_tokens
        for image in request.contents:
            span = image.span
            if span.start < end and row.start < span.end:
                assert self.features.acquire(span.digest), "its features are there"
                self.features.release(span.digest)
                is_whole = not self.limits.whole_spans or span.end <= end
                assert is_whole, "a span is cut"
        if self.limits.whole_prompts and row.start < len(request.prompt_ids):
            assert row.start == 0
            assert end >= len(request.prompt_ids), "a prompt is cut"
        return super()._run_row(row, step_id)


class VisionWorld(World):
    """A `VisionScheduler` and its runner; pages may be too few, and the cache too small."""

    def __init__(
        self, *, limits: VisionLimits | None = None, max_entries: int = 4, **options: object
    ) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.limits = limits or VisionLimits(max_step_patches=16)
        self.features: ContentCache[str] = ContentCache(10**6, copy=str, max_entries=max_entries)
        self.pool.enable_prefix_caching = not self.limits.whole_prompts
        self.scheduler = VisionScheduler(
            model=MODEL,
            pool=self.pool,
            options=self.options,
            max_length=self.max_length,
            namespace=NAMESPACE,
            vision=VisionResources(self.features, self.limits),
        )
        self.runner = ShadowVisionRunner(
            features=self.features,
            limits=self.limits,
            num_pages=self.pool.num_pages,
            page_size=self.pool.page_size,
            requests=self.requests,
        )
        self.kinds: list[str] = []

    def take(self, proposal: Proposal) -> Plan | None:
        return SchedulerDriver.take(self, proposal)

    def launch(self, plan: Plan) -> StepResult:
        self.kinds.append(plan.kind)
        if isinstance(plan, EncodePlan):
            # Its features are there when the step is over, but they count from its launch.
            return self.runner.encode(plan)
        assert isinstance(plan, TokenPlan)
        return self.runner.run(plan)

    def over(self, plan: Plan, outcome: StepResult | TriptychError) -> None:
        if isinstance(plan, TokenPlan):
            super().over(plan, outcome)

    def settled(self, plan: Plan) -> None: ...

    def fail(self, error: TriptychError) -> bool:
        if self.in_flight and isinstance(plan := self.in_flight[0][0], EncodePlan):
            result = self.in_flight[0][1]
            assert isinstance(result, StepResult)
            for image, problem in zip(plan.images, result.rows, strict=True):
                if problem is None:
                    self.features.release(image.span.digest)
            self.features.clear()
        return super().fail(error)

    def finish_all(self) -> None:
        """Run to the end; nothing is held by anybody."""
        self.let_all_go_on()
        assert all(job.state.is_final for job in self.jobs.values())
        assert self.pool.num_leased == 0
        assert self.features.num_references == 0

    def answer(self, job_id: str) -> tuple[int, ...]:
        """What a job has to say."""
        request = self.requests[job_id]
        expected, num_prompt = ExpectedVisionTokens(request), len(request.prompt_ids)
        limit = min(request.sampling.max_tokens, self.max_length - num_prompt)
        return tuple(expected.sampled_after(num_prompt + index) for index in range(limit))


class VisionDriver(Driver):
    """Does to a vision world whatever an engine and its callers may do."""

    def submit(self) -> None:
        rng = self.rng
        request = random_request(rng)
        if rng.random() < 0.8 or self.world.limits.whole_prompts:
            parts: Sequence[int | tuple[str, int]] = [
                rng.choice((rng.randrange(1, 6), (rng.choice("abc"), rng.choice((1, 3, 9)))))
                for _ in range(rng.randrange(1, 4))
            ]
            images = [("d", 2)] if self.world.limits.whole_prompts else []
            max_tokens = rng.choice((1, 3, 9))
            request = see(
                *parts, *images, rng.randrange(1, 4), max_tokens=max_tokens, tenant=request.tenant
            )
        self.world.submit(f"job-{self.num_jobs}", request)
        self.num_jobs += 1


def random_vision_world(rng: random.Random) -> VisionWorld:
    """One whose pages and cache are often too small."""
    whole = rng.choice(("", "", "spans", "prompts"))
    return VisionWorld(
        limits=VisionLimits(
            max_step_patches=rng.choice((4, 12)),
            whole_spans=whole == "spans",
            whole_prompts=whole == "prompts",
        ),
        max_entries=rng.choice((0, 1, 4)),
        num_pages=rng.choice((12, 20, 40)),
        page_size=rng.choice((2, 4)),
        max_length=48,
        depth=rng.choice((1, 2)),
        max_batch_size=rng.choice((1, 3, 6)),
        max_batch_input_tokens=rng.choice((5, 11, 64)),
        enable_chunked_prefill=rng.random() < 0.8,
        max_queue_size=8,
    )


def live(seed: int, num_actions: int) -> VisionWorld:
    """The whole life of a vision world."""
    rng = random.Random(seed)
    world = random_vision_world(rng)
    driver = VisionDriver(world, rng)
    for _ in range(num_actions):
        driver.act()
    driver.finish()
    return world


MEMORY_SHORT = OutOfMemory("full")

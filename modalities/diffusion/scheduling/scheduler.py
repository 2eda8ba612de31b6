"""Step batching of images: images at different steps share the model's runs.

Owns the life of images: each image of a job is encoded, denoised and decoded. `policy` chooses the
images of a step; this module books the step and records its results. Knows no tensors.

Plans overlap: an image's position is advanced when a step of it is booked, so that its next one can
be booked while that is in flight. Results are recorded when a step ends; results of images that
have ended meanwhile are dropped. After a step that ran out of memory its images are planned again
in smaller steps; images that a later step has already continued from there start again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from triptych.core.engine_api.job import Job, JobState
from triptych.core.engine_api.plan import StepResult
from triptych.core.engine_api.tokens import AdapterDrop, AdapterLoad
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.modalities.diffusion.plan import (
    DenoisePlan,
    ImageCost,
    ImageRow,
    ImageRowResult,
    ImageStart,
)
from triptych.modalities.diffusion.scheduling.adapters import AdapterJobs
from triptych.modalities.diffusion.scheduling.policy import (
    SKIPPING,
    DenoisePolicy,
    DenoiseStep,
    denoise_work,
)
from triptych.modalities.diffusion.scheduling.state import (
    DenoiseState,
    ImageJob,
    ImageState,
    ImageStatus,
    ScheduledImage,
)
from triptych.modalities.diffusion.scheduling.step_spans import StepSpan
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest
from triptych.schedulers.batcher import Batcher


class DenoiseScheduler(Batcher[ImageJob, DenoiseStep, ScheduledImage]):
    """Schedules the `ImageRequest` jobs of one model.

    `measure` returns the resources of a request's images, and raises `InvalidRequest` for images
    that the model can never generate. At most `max_images` are in progress, with `max_state_bytes`
    in sum. A run of the model has at most `max_rows` rows, or those of one image. No step has a
    deadline on the timeline; a job's deadline orders images among themselves. It `splits_guidance`
    into two steps where one would delay other models, unless the branches run in parallel on
    several ranks.
    """

    splits_guidance = True

    def __init__(
        self,
        *,
        model: str,
        measure: Callable[[ImageRequest], ImageCost],
        max_images: int,
        max_state_bytes: int,
        max_jobs: int,
        max_rows: int,
    ) -> None:
        counters = (
            "images_total",
            "image_retries_total",
            "denoise_runs_total",
            "denoise_rows_total",  # divided by the runs: rows per run
            "denoise_steps_computed_total",
            "denoise_steps_skipped_total",
        )
        super().__init__(model=model, max_jobs=max_jobs, counters=counters)
        self._measure = measure
        self._max_rows = max_rows
        self._state = DenoiseState(
            max_images=max_images, max_state_bytes=max_state_bytes, jobs=self._jobs
        )
        self._num_submitted = 0
        self.adapters: AdapterJobs | None = None
        """Set before the first job where adapters may come and go."""

    def uses_adapter(self, name: str) -> bool:
        """Whether an image that has not ended, or is in a step in flight, uses an adapter."""
        in_flight = [row.unit.entry for row in self._rows_in_flight()]
        entries = [*self._jobs.values(), *in_flight]
        return any(use.name == name for entry in entries for use in entry.request.adapters)

    def check(self) -> None:
        """Assert that every image is accounted for."""
        self._state.check(self._rows_in_flight())

    # Jobs.

    def submit(self, job: Job) -> None:
        """Accept a job; those that load or drop adapters take no step."""
        if not isinstance(job.request, AdapterLoad | AdapterDrop):
            super().submit(job)
        elif self.adapters is None:
            raise UnsupportedOption("This model's adapters are those of --lora-paths.")
        else:
            self.adapters.submit(job)

    def _open(self, job: Job) -> ImageJob:
        request = job.request
        assert isinstance(request, ImageRequest), "the API sends this model image requests"
        if request.num_images < 1:
            raise InvalidRequest("At least one image must be requested.", param="n")
        cost = self._measure(request)
        if cost.state_bytes > self._state.max_state_bytes:
            raise InvalidRequest("An image of this size does not fit into memory.", param="size")
        return ImageJob(job, job.is_paused, request, cost, self._num_submitted)

    def _on_submit(self, opened: ImageJob) -> None:
        self._num_submitted += 1
        self._state.add(opened)
        self._send_positions()

    def _on_pause(self, opened: ImageJob) -> None:
        self._send_positions()

    def _cancel_payload(self, opened: ImageJob) -> ImageDelta:
        return ImageDelta(finish_reason="cancelled")

    def _counts_of(self, opened: ImageJob) -> Mapping[str, int]:
        skipped = [image.skipped for image in opened.images]
        for index, steps in enumerate(skipped):
            opened.job.recorder.skip(index, steps)
        return {
            "images": len(opened.images),
            "computed_steps": sum(image.num_computed for image in opened.images),
            "skipped_steps": sum(map(len, skipped)),
        }

    def _on_end(self, opened: ImageJob) -> None:
        """Release the job's images, with the next plan."""
        self._state.remove(opened)
        self._send_positions()
        self._advance_adapters()

    def _on_step_end(self, now_s: float) -> None:
        self._advance_adapters()

    def _advance_adapters(self) -> None:
        if self.adapters is not None:
            self.adapters.advance()

    def _num_waiting(self) -> int:
        return sum(1 for _ in self._state.queued_jobs)

    def _gauges(self) -> dict[str, float]:
        return {
            "images_waiting": len(self._state.waiting),
            "images_running": len(self._state.running),
            "image_state_bytes": self._state.state_bytes,
        }

    def _send_positions(self) -> None:
        """Send waiting jobs their queue positions, if requested and changed."""
        for position, entry in enumerate(self._state.queued_jobs):
            is_asked = entry.request.has_progress and not entry.is_paused
            if is_asked and entry.sent_position != position:
                entry.sent_position = position
                self._send(entry, ImageDelta(queue_position=position))

    # Steps.

    def _choose_step(self, now_s: float) -> DenoiseStep | None:
        return DenoisePolicy(
            state=self._state,
            shares=self._shares,
            costs=self.costs,
            max_rows=self._max_rows,
            budget_s=self._step_budget_s,
            splits_guidance=self.splits_guidance,
        ).choose_step()

    def _book_step(
        self, step: DenoiseStep, step_id: int, now_s: float
    ) -> tuple[DenoisePlan, Sequence[ScheduledImage]]:
        state, is_start = self._state, step.kind == "encode"
        dropped, state.dropped = tuple(state.dropped), []
        for image in step.overtaken:
            image.num_times_overtaken += 1
        rows = tuple(self._take_row(step, image, now_s) for image in step.rows)
        if is_start:
            self._send_positions()
        plan = DenoisePlan(
            step_id=step_id,
            model=self._model,
            kind=step.kind,
            rows=() if is_start else tuple(map(_to_row, rows)),
            starts=tuple(
                ImageStart(key=image.key, request=image.entry.request)
                for image in (step.rows if is_start else ())
            ),
            dropped=dropped,
        )
        return plan, rows

    def _take_row(self, step: DenoiseStep, image: ImageState, now_s: float) -> ScheduledImage:
        """Move an image on."""
        match step.kind:
            case "encode":
                self._state.admit(image)
                image.entry.job.state = JobState.RUNNING
                image.entry.job.timings.setdefault("scheduled_s", now_s)
            case "decode":
                image.stage = ImageStatus.DECODING
            case "write":
                num_tokens = min(step.num_tokens, image.num_unwritten)
                image.num_unwritten -= num_tokens
                self._shares.charge(image.client, num_tokens)
                return ScheduledImage(image, num_tokens=num_tokens)
            case "denoise":
                span = image.span
                self._shares.charge(image.client, span.num_rows * image.num_tokens)
                image.is_half_evaluated = step.evaluates_ahead
                if step.evaluates_ahead:
                    skipped = StepSpan(span.num_steps - 1, span.stop - 1, 0)
                    return ScheduledImage(image, skipped, evaluates_ahead=True)
                image.num_spans += 1
                return ScheduledImage(image, span, image.preview_after(image.num_spans))
        return ScheduledImage(image)

    def _learn(self, step: DenoiseStep, kind: str, result: StepResult) -> None:
        """Count the computed runs and learn their seconds: caches may have skipped chosen rows."""
        work, counters = step.work, self._counters
        if kind == "denoise":
            sizes: set[int] = set()
            num_rows = num_tokens = 0
            for row, found in zip(step.rows, result.rows, strict=True):
                assert row.span is not None, "a denoised row has a span"
                counters["denoise_steps_computed_total"] += found.num_computed
                counters["denoise_steps_skipped_total"] += row.span.num_steps - found.num_computed
                if found.num_rows:
                    sizes.add(row.unit.num_tokens)
                num_rows += found.num_rows
                num_tokens += found.num_rows * row.unit.num_tokens
            counters["denoise_runs_total"] += len(sizes)
            counters["denoise_rows_total"] += num_rows
            work = denoise_work(num_rows, num_tokens) if num_rows else SKIPPING
        self.costs.observe(kind, work, result.elapsed_s)

    def _is_void(self, row: ScheduledImage) -> bool:
        return row.unit.stage is ImageStatus.OVER

    def _accept(
        self, step: DenoiseStep, row: ScheduledImage, found: ImageRowResult, now_s: float
    ) -> None:
        image = row.unit
        if found.error is not None:
            self._end(image.entry, JobState.FAILED, error=found.error)
        elif step.kind == "encode":
            assert found.planned is not None, "encoding yields the steps"
            image.begin(found.planned)
            if image.entry.request.has_progress:
                self._show(image, now_s)
        elif step.kind == "denoise":
            self._accept_span(row, found, now_s)
        elif step.kind == "decode":
            assert found.pixels is not None, "decoding yields an image"
            self._counters["images_total"] += 1
            self._state.finish(image)
            self._show(image, now_s, found)

    def _accept_span(self, row: ScheduledImage, found: ImageRowResult, now_s: float) -> None:
        image = row.unit
        assert row.span is not None, "a denoised row has a span"
        if image.is_interrupted:
            return  # this span was in flight then, and computed nothing
        if found.is_interrupted:
            image.interrupt()
        image.step = row.span.stop
        image.num_computed += found.num_computed
        stop = row.span.stop - found.num_computed
        image.skipped += range(row.span.stop - row.span.num_steps, stop)
        if found.pixels is not None:
            image.num_shown = row.preview + 1
            self._show(image, now_s, found, row.preview)
        elif image.entry.request.has_progress and not row.evaluates_ahead:
            self._show(image, now_s)

    def _retry(
        self, step: DenoiseStep, live: list[ScheduledImage], later: Iterable[ScheduledImage]
    ) -> bool:
        """Retry the images in steps of half the size."""
        if not step.size:
            return False
        self._state.max_size[step.kind] = step.size / 2
        for row in live:
            self._counters["image_retries_total"] += 1
            self._state.rollback(row)
        return True

    def _show(
        self,
        image: ImageState,
        now_s: float,
        found: ImageRowResult = ImageRowResult(),  # noqa: B008 - it is frozen
        preview: int = -1,
    ) -> None:
        """Send the progress of an image; a job's last image ends it."""
        entry, planned = image.entry, image.planned
        assert planned is not None, "an image is encoded before it is shown"
        entry.job.timings.setdefault("first_output_s", now_s)
        is_last = all(each.stage is ImageStatus.OVER for each in entry.images)
        delta = ImageDelta(
            image=image.index,
            step=image.step,
            num_steps=planned.num_steps,
            num_computed=image.num_computed,
            pixels=found.pixels,
            layers=found.layers,
            partial_index=preview,
            num_prompt_tokens=planned.num_prompt_tokens,
            is_prompt_cut=planned.is_prompt_cut,
            finish_reason="stop" if is_last else None,
        )
        if is_last:
            self._end(entry, JobState.FINISHED, payload=delta)
        else:
            self._send(entry, delta)


def _to_row(row: ScheduledImage) -> ImageRow:
    return ImageRow(
        key=row.unit.key,
        num_steps=row.span.num_steps if row.span else 0,
        has_preview=row.preview >= 0,
        evaluates_ahead=row.evaluates_ahead,
        num_tokens=row.num_tokens,
    )

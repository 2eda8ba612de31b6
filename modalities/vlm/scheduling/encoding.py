"""The encoder role: an engine that only encodes images, for other engines.

Owns the jobs of such an engine, one per image, and the transfers that wait for each. Features are
cached by the image's digest, so that an image requested several times is encoded once. Knows no
sockets, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import WrongModel
from triptych.core.kv.transfer.server import PageTransferRequest
from triptych.modalities.vlm.scheduling.features import FEATURE_PREFIX, SendingMemory, feature_parts
from triptych.modalities.vlm.scheduling.prompts import num_patches_of
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.roles.transfer_jobs import PageSink, TransferJobs, exchange_stats
from triptych.schedulers.staged import JobPace, StagedScheduler, StageLimits

_MAX_STEP_IMAGES = 64


class EncodeScheduler(StagedScheduler):
    """Schedules images; a step encodes up to `max_step_patches` of several, or one."""

    def __init__(self, *, model: str, max_jobs: int, max_step_patches: int) -> None:
        limits = StageLimits(
            max_rows=_MAX_STEP_IMAGES,
            max_size=max_step_patches,
            max_started=2 * _MAX_STEP_IMAGES,
        )
        super().__init__(model=model, open_pace=_open_pace, max_jobs=max_jobs, limits=limits)
        self.add_stats: Callable[[SchedulerStats], SchedulerStats] = lambda stats: stats
        """Adds the counts of sent features; set before jobs come."""

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        return self.add_stats(super().stats())


def _open_pace(job: Job) -> JobPace:
    """The pace of an image's job. Raises `WrongModel` for any other request."""
    if not isinstance(job.request, PromptContent):
        raise WrongModel(
            "This server only encodes images; send requests to the one with the language model."
        )
    return JobPace(Stage("encode", num_patches_of(job.request)))


@dataclass(eq=False, slots=True)
class _SentImage:
    """The pages of an image's features that are held for a transfer, once encoded."""

    image: PromptContent
    num_bytes: int
    page_ids: Sequence[int] = ()


class SentFeatures(TransferJobs):
    """Encodes images for other engines, and sends their features."""

    def __init__(
        self, scheduler: EncodeScheduler, memory: SendingMemory, sink: PageSink, model: str
    ) -> None:
        super().__init__(sink, model, "features")
        self._counts = Counter(feature_transfers_total=0, images_encoded_total=0)
        self._scheduler = scheduler
        self._memory = memory
        self._sent: dict[PageTransferRequest, _SentImage] = {}
        self._jobs: dict[bytes, str] = {}
        scheduler.add_stats = self.add_stats

    def open(self, transfer: PageTransferRequest) -> None:
        """On the server's thread: check an image, and start encoding it."""
        image = transfer.wanted.request
        if isinstance(image, PromptContent) and self._can_be(image, transfer):
            self._post(partial(self._open, transfer, image))
        else:
            transfer.end("no image that can be encoded here")

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of sent features."""
        return exchange_stats(stats, self._counts, self._sink.counts, FEATURE_PREFIX)

    def _can_be(self, image: PromptContent, transfer: PageTransferRequest) -> bool:
        lengths = [length for _, length in image.span.runs]
        if not lengths or min(lengths) < 1:
            return False
        num_pages = self._memory.num_pages_of(sum(lengths))
        are_whole = bool(image.inputs) and all(a.is_whole for a in image.inputs.values())
        wanted = transfer.wanted
        is_whole = (wanted.first, wanted.num_pages, wanted.num_parts) == (0, num_pages, num_pages)
        return are_whole and is_whole

    def _open(self, transfer: PageTransferRequest, image: PromptContent) -> None:
        self._counts["feature_transfers_total"] += 1
        span = image.span
        num_bytes = self._memory.num_bytes_of(span.num_features)
        num_held = sum(sent.num_bytes for sent in self._sent.values())
        if num_held + num_bytes > self._memory.capacity_bytes:
            transfer.end("too many images at once")
            return
        sent = self._sent[transfer] = _SentImage(image, num_bytes)
        if self._send(transfer, sent) or span.digest in self._jobs:
            return
        job_id = self._jobs[span.digest] = self._new_id()
        self._run(job_id, image, partial(self._take, span.digest))

    def _send(self, transfer: PageTransferRequest, sent: _SentImage) -> bool:
        """Pass an image's pages to its transfer; false if it is not encoded."""
        span = sent.image.span
        sent.page_ids = self._memory.lend(span.digest)
        if len(sent.page_ids) == transfer.wanted.num_pages:
            transfer.add(feature_parts(span, sent.page_ids))
        elif sent.page_ids:
            transfer.end("its features are not of the size that was requested")
        return bool(sent.page_ids)

    def _take(self, digest: bytes, output: Output) -> None:
        """Finish the job of an image; all transfers that wait for it get its features."""
        del self._jobs[digest]
        waiting = self._waiting_for(digest)
        if output.payload is None:
            error = output.error
            for transfer, _ in waiting:
                transfer.end(f"{error.code}: {error.message}" if error else "not encoded")
            return
        self._counts["images_encoded_total"] += 1
        self._memory.keep(digest, output.payload)
        for transfer, sent in waiting:
            self._send(transfer, sent)
        self._memory.release(digest)

    def _close(self, transfer: PageTransferRequest) -> None:
        sent = self._sent.pop(transfer, None)
        if sent is None:
            return  # its image was not accepted
        self._memory.drop(sent.page_ids)
        digest = sent.image.span.digest
        if digest in self._jobs and not self._waiting_for(digest):
            self._scheduler.cancel(self._jobs[digest])

    def _waiting_for(self, digest: bytes) -> list[tuple[PageTransferRequest, _SentImage]]:
        return [
            (transfer, sent)
            for transfer, sent in self._sent.items()
            if sent.image.span.digest == digest and not sent.page_ids
        ]

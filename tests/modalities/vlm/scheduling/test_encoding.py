"""What an engine of role encode does with transfers: one image at a time for all who want it."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from support.driver import SchedulerDriver
from support.vision_world import patches, token_request
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.engine_api.prompt_content import Array, ContentSpan, PromptContent
from triptych.core.engine_api.staged_plan import StagedPlan, StagedRowResult
from triptych.core.errors import InvalidRequest, TriptychError, WrongModel, to_info
from triptych.core.kv.parts import PagePart
from triptych.core.kv.transfer.memory import new_counts
from triptych.core.kv.transfer.messages import FetchPages
from triptych.modalities.vlm.scheduling.encoding import EncodeScheduler, SentFeatures


@dataclass(eq=False)
class Transfer:
    """A `PageTransferRequest` that keeps what it gets."""

    wanted: FetchPages
    pages: list[PagePart] = field(default_factory=list)
    reason: str = ""

    def add(self, pages: Sequence[PagePart]) -> None:
        self.pages += pages

    def end(self, reason: str) -> None:
        self.reason = reason


class Memory:
    """Implements `SendingMemory`: features of 1 byte, two on a page, all kept while referenced."""

    def __init__(self) -> None:
        self.capacity_bytes = 100
        self.references: Counter[bytes] = Counter()
        self.lent: dict[int, bytes] = {}
        self._ids = itertools.count()

    def num_bytes_of(self, num_features: int) -> int:
        return num_features

    def num_pages_of(self, num_features: int) -> int:
        return -(-num_features // 2)

    def keep(self, digest: bytes, features: Any) -> None:
        assert not self.references[digest], "encoded twice"
        self.references[digest] += 1

    def release(self, digest: bytes) -> None:
        self.references[digest] -= 1
        assert self.references[digest] >= 0

    def lend(self, digest: bytes) -> Sequence[int]:
        if not self.references[digest]:
            return ()
        self.references[digest] += 1
        page_ids = [next(self._ids) for _ in range(2)]
        self.lent.update(dict.fromkeys(page_ids, digest))
        return page_ids

    def drop(self, page_ids: Sequence[int]) -> None:
        if digests := {self.lent.pop(page_id) for page_id in page_ids}:
            (digest,) = digests
            self.release(digest)


class Rig(SchedulerDriver):
    """The scheduler of an encoder with its transfers; an image called `bad` cannot be encoded."""

    def __init__(self) -> None:
        scheduler = EncodeScheduler(model="eyes", max_jobs=4, max_step_patches=8)
        super().__init__(scheduler, None, model="eyes")
        self.counts = new_counts(2)
        self.memory = Memory()
        self.sent = SentFeatures(scheduler, self.memory, self, "eyes")
        self.sent.attach(self._submit)
        self.steps: list[int] = []

    def start(self, transfers: SentFeatures) -> None:
        assert transfers is self.sent

    def _submit(self, job: Job) -> None:
        try:
            self.scheduler.submit(job)
        except TriptychError as error:
            job.sink(Output(job_id=job.job_id, is_final=True, error=to_info(error)))

    def launch(self, plan: Plan) -> StepResult:
        assert isinstance(plan, StagedPlan)
        self.steps.append(len(plan.rows))
        requests = {start.job_id: start.request for start in plan.starts}
        bad = InvalidRequest("It does not fit.")
        return StepResult(
            rows=[
                StagedRowResult(error=bad)
                if requests[row.job_id].span.digest == image("bad").span.digest
                else StagedRowResult(payload="features")
                for row in plan.rows
            ]
        )

    def transfer(self, wanted: PromptContent, **more: int) -> Transfer:
        given = {"first": 0, "num_pages": 2, "num_parts": 2} | more
        transfer = Transfer(FetchPages(fetch_id=0, request=wanted, **given))
        self.sent.open(transfer)  # type: ignore[arg-type]
        return transfer

    def close(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            self.sent.close(transfer)  # type: ignore[arg-type]

    def check_nothing_is_held(self) -> None:
        assert not self.memory.lent
        assert not any(self.memory.references.values())
        assert not self.scheduler.stats().num_running + self.scheduler.stats().num_waiting


def image(name: str, num_features: int = 4) -> PromptContent:
    span = ContentSpan(digest=hashlib.sha256(name.encode()).digest(), runs=((0, num_features),))
    content = Array("uint8", (num_features, 14 * 14 * 3), bytes(num_features * 14 * 14 * 3))
    return PromptContent(span=span, inputs={"pixel_values": content})


def test_an_image_is_encoded_once_for_all_who_want_it_and_sent_to_each() -> None:
    rig = Rig()
    first, second = rig.transfer(image("x")), rig.transfer(image("x"))
    rig.run()
    third = rig.transfer(image("x"))
    assert rig.steps == [1]
    for transfer in (first, second, third):
        digest = image("x").span.digest
        assert [part.key for part in transfer.pages] == [digest + b"\0" * 4, digest + b"\1\0\0\0"]
    assert len({part.number for each in (first, second, third) for part in each.pages}) == 6
    rig.close(first, second, third)
    rig.check_nothing_is_held()
    counters = rig.scheduler.stats().counters
    assert (counters["feature_transfers_total"], counters["images_encoded_total"]) == (3, 1)


def test_images_share_a_step_within_its_size() -> None:
    rig = Rig()
    transfers = [rig.transfer(image(name)) for name in "abc"]
    rig.run()
    assert rig.steps == [2, 1]
    assert all(transfer.pages for transfer in transfers)
    rig.close(*transfers)


def test_an_encoding_failure_is_reported_to_requests_with_the_image_alone() -> None:
    rig = Rig()
    bad, good = rig.transfer(image("bad")), rig.transfer(image("x"))
    rig.run()
    assert "does not fit" in bad.reason
    assert good.pages
    rig.close(bad, good)
    rig.check_nothing_is_held()


def test_an_unwanted_image_is_not_encoded() -> None:
    rig = Rig()
    first, second = rig.transfer(image("x")), rig.transfer(image("x"))
    rig.close(first)
    assert rig.scheduler.stats().num_waiting == 1
    rig.close(second)
    rig.run()
    assert rig.steps == []
    rig.check_nothing_is_held()


def test_one_that_is_dropped_while_it_is_encoded_leaves_nothing() -> None:
    rig = Rig()
    transfer = rig.transfer(image("x"))
    rig.book()
    rig.close(transfer)
    again = rig.transfer(image("x"))
    rig.run()
    assert again.pages
    rig.close(again)
    rig.check_nothing_is_held()


def test_orders_beyond_what_is_kept_for_them_are_refused() -> None:
    rig = Rig()
    rig.memory.capacity_bytes = 10
    first, second, third = (rig.transfer(image(name)) for name in "abc")
    assert [each.reason for each in (first, second)] == ["", ""]
    assert third.reason == "too many images at once"
    rig.close(third, first, second)
    rig.check_nothing_is_held()


def test_features_of_another_size_than_asked_for_are_not_sent() -> None:
    rig = Rig()
    first = rig.transfer(image("x"))
    rig.run()
    longer = replace(image("x", 6), span=replace(image("x").span, runs=((0, 6),)))
    second = rig.transfer(longer, num_pages=3, num_parts=3)
    assert second.pages == []
    assert "not of the size" in second.reason
    rig.close(first, second)
    rig.check_nothing_is_held()


def test_a_full_queue_is_reported() -> None:
    rig = Rig()
    transfers = [rig.transfer(image(str(n))) for n in range(5)]
    assert "overloaded" in transfers[-1].reason
    rig.close(*transfers)
    rig.check_nothing_is_held()


@pytest.mark.parametrize(
    ("wanted", "more"),
    [
        (token_request((1, 2)), {}),
        (image("x"), {"num_pages": 3}),
        (image("x"), {"first": 1, "num_pages": 1}),
        (replace(image("x"), inputs={}), {}),
        (replace(image("x"), inputs={"pixel_values": patches(4)}), {}),
        (replace(image("x"), inputs={"pixel_values": Array("uint8", (-1, -1), b"1")}), {}),
        (replace(image("x"), span=ContentSpan(digest=b"", runs=())), {"num_pages": 0}),
        (replace(image("x"), span=ContentSpan(digest=b"", runs=((0, 9), (9, -5)))), {}),
    ],
)
def test_an_order_that_cannot_be_is_refused_by_itself(wanted: Any, more: dict[str, int]) -> None:
    rig = Rig()
    transfer = rig.transfer(wanted, **more)
    assert transfer.reason == "no image that can be encoded here"
    rig.close(transfer)
    rig.check_nothing_is_held()


def test_a_chat_is_refused_with_a_reason() -> None:
    rig = Rig()
    job = Job(
        job_id="a",
        model="eyes",
        request=token_request((1, 2)),
        sink=lambda output: None,
        arrival_s=0.0,
    )
    with pytest.raises(WrongModel, match="only encodes images"):
        rig.scheduler.submit(job)

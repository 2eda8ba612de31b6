"""Prompts whose images another engine encodes: they wait for them, or encode them here."""

from __future__ import annotations

import pytest

from support.image_link import HandImages
from support.token_world import token_request
from support.vision_world import VisionWorld, see
from triptych.core.kv.transfer.client import PageFetch
from triptych.core.kv.transfer.memory import new_counts
from triptych.schedulers.roles.page_exchange import FetchedPages


def linked(**options: object) -> tuple[VisionWorld, HandImages]:
    given = {"num_pages": 80, "max_batch_size": 4} | options
    world = VisionWorld(**given)  # type: ignore[arg-type]
    return world, HandImages(world)


def counter(world: VisionWorld, name: str) -> float:
    return world.scheduler.stats().counters[name]


def check_answers(world: VisionWorld) -> None:
    world.finish_all()
    for job_id in world.jobs:
        assert world.output_ids(job_id) == world.answer(job_id)


def test_an_image_comes_from_elsewhere_and_nothing_is_encoded_here() -> None:
    world, link = linked()
    world.submit("a", see(3, ("x", 9), 2, max_tokens=3))
    keys = [part.key for part in link.open[0].parts]
    assert keys == [link.digests[0] + bytes([n, 0, 0, 0]) for n in range(5)]
    world.run()
    assert world.kinds == ["prefill"], "the text before it"
    link.deliver_all()
    check_answers(world)
    assert world.runner.encoded == []
    assert counter(world, "feature_fetches_total") == 1
    assert counter(world, "feature_fallbacks_total") == 0
    assert counter(world, "images_encoded_total") == 0


def test_fetched_features_are_not_reported_as_cached() -> None:
    world, link = linked()
    for job_id in ("cold", "warm"):
        world.submit(job_id, see(1, ("x", 5), 2, max_tokens=1))
        link.deliver_all()
        world.run()
    assert world.payloads("cold")[-1].num_cached_contents == 0
    assert world.payloads("warm")[-1].num_cached_contents == 1
    assert counter(world, "feature_fetches_total") == 1


def test_one_fetch_is_for_all_who_show_an_image() -> None:
    world, link = linked()
    for job_id in "abc":
        world.submit(job_id, see(ord(job_id) % 5 + 1, ("x", 5), 2, max_tokens=2))
    assert len(link.open) == 1
    link.deliver_all()
    check_answers(world)
    assert world.runner.encoded == []


@pytest.mark.parametrize("reason", ["nobody", "too much", "lost", "no room"])
def test_what_does_not_come_is_encoded_here_once(reason: str) -> None:
    world, link = linked()
    link.is_connected = reason != "nobody"
    link.has_room = reason != "no room"
    link.capacity_bytes = 4 if reason == "too much" else 1000
    world.submit("a", see(3, ("x", 5), 2, max_tokens=3))
    for fetch in tuple(link.open):
        (link.lose if reason == "lost" else link.deliver)(fetch)
    world.submit("b", see(2, ("x", 5), 2, max_tokens=3))  # does not begin it all again
    assert not link.open
    check_answers(world)
    assert len(world.runner.encoded) == 1
    assert counter(world, "feature_fallbacks_total") == 1


def test_an_image_without_requests_is_not_fetched_on() -> None:
    world, link = linked()
    for job_id in "ab":
        world.submit(job_id, see(3, ("x", 5), 2, max_tokens=3))
    world.scheduler.cancel("a")
    assert link.open, "another waits for it"
    world.scheduler.cancel("b")
    assert not link.open
    assert counter(world, "feature_fallbacks_total") == 0
    check_answers_of_none(world)


def check_answers_of_none(world: VisionWorld) -> None:
    world.finish_all()
    assert world.runner.encoded == []


def test_text_is_answered_while_an_image_is_waited_for() -> None:
    world, link = linked()
    world.submit("seen", see(3, ("x", 9), 2, max_tokens=3))
    world.submit("text", token_request((1, 2, 3), max_tokens=6))
    world.run()
    assert world.has_ended("text")
    assert not world.has_ended("seen")
    link.deliver_all()
    check_answers(world)


class NoPages:
    """A `PageSource` that promises pages."""

    def __init__(self) -> None:
        self.counts, self.is_connected = new_counts(4), True
        self.open: list[PageFetch] = []

    def start(self, fetch: PageFetch) -> None:
        self.open.append(fetch)

    def stop(self, fetch: PageFetch) -> None: ...


def test_the_image_of_a_prompt_whose_pages_do_not_come_is_asked_for() -> None:
    world, link = linked()
    source = NoPages()
    world.scheduler.exchange = FetchedPages(world.scheduler, source)
    world.submit("a", see(3, ("x", 5), 9, max_tokens=3))
    assert not link.open, "its positions are on their way"
    (fetch,) = source.open
    fetch.ended()
    assert len(link.open) == 1
    link.deliver_all()
    check_answers(world)
    assert world.runner.encoded == []


def test_an_image_that_cannot_be_kept_for_any_reason_is_encoded_here() -> None:
    world, link = linked()
    link.fault = OSError("a fault")
    world.submit("a", see(3, ("x", 5), 2, max_tokens=3))
    with pytest.raises(OSError, match="a fault"):
        link.deliver_all()
    assert not link.expected, "its pages are given back"
    check_answers(world)
    assert len(world.runner.encoded) == 1
    assert counter(world, "feature_fallbacks_total") == 1

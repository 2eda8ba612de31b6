"""Rows whose prompts another engine computes: they wait for pages, find them, or do without."""

import random

import pytest

from support.page_link import HandLink, ManualTransfer, drive_pair
from support.shadow_parts import random_model, world_of
from support.token_steps import prompt, step
from support.token_world import World, token_request
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.transfer.messages import FetchPages
from triptych.schedulers.roles.page_exchange import _prompt_of


def linked(**options: object) -> HandLink:
    """Two engines with pages of four tokens; prompts are computed two pages at a time."""
    given = {"num_pages": 40, "max_batch_input_tokens": 8} | options
    return HandLink(World(**given), World(**given))  # type: ignore[arg-type]


def counter(world: World, name: str) -> float:
    return world.scheduler.stats().counters[name]


def test_a_prompt_is_computed_elsewhere_but_for_its_last_page() -> None:
    link = linked()
    link.decode.submit("a", token_request(prompt(18), max_tokens=5))
    assert link.decode.book() is None, "it waits for its pages"
    link.carry_all()
    assert step(link.decode) == [("a", 2)]
    link.decode.finish_all()
    link.prefill.finish_all()
    assert link.prefill.runner.num_computed_tokens == 16
    assert counter(link.decode, "page_fetches_total") == 1
    assert counter(link.decode, "page_fallbacks_total") == 0
    assert counter(link.prefill, "page_transfers_total") == 1


def test_pages_are_sent_as_they_are_computed() -> None:
    link = linked()
    link.decode.submit("a", token_request(prompt(18), max_tokens=1))
    (transfer,) = link.open
    sent = []
    for _ in range(3):
        link.prefill.book()
        link.prefill.commit()
        sent.append(len(transfer.pages))
    assert sent == [2, 4, 4]


def test_pages_of_another_engine_are_not_reported_as_cached() -> None:
    link = linked()
    for name in ("cold", "warm"):
        link.decode.submit(name, token_request(prompt(18), max_tokens=1))
        link.carry_all()
        link.decode.finish_all()
    assert link.decode.deltas("cold")[0].num_cached_tokens == 0
    assert link.decode.deltas("warm")[0].num_cached_tokens == 16


def test_only_missing_pages_are_fetched() -> None:
    link = linked()
    link.decode.submit("a", token_request(prompt(9), max_tokens=1))
    link.carry_all()
    link.decode.finish_all()
    link.decode.submit("b", token_request((*prompt(8), *prompt(9, 7)), max_tokens=1))
    (transfer,) = link.open
    assert (transfer.wanted.first, transfer.wanted.num_pages) == (2, 2)


def test_equal_beginnings_are_fetched_once() -> None:
    link = linked()
    for name in "ab":
        link.decode.submit(name, token_request((*prompt(12), ord(name) % 50), max_tokens=1))
    assert len(link.open) == 1
    link.carry_all()
    link.decode.finish_all()


def test_a_beginning_that_many_share_takes_room_once() -> None:
    link = linked()
    link.decode.submit("first", token_request(prompt(33), max_tokens=1))
    link.carry_all()
    link.decode.finish_all()
    for name in "abcd":  # each follows 8 of 40 pages, and lacks one
        ids = (*prompt(32), *prompt(5, ord(name) % 50))
        link.decode.submit(name, token_request(ids, max_tokens=1))
    assert len(link.open) == 4
    link.carry_all()
    link.decode.finish_all()


def test_others_go_on_while_a_prompt_is_waited_for() -> None:
    link = linked()
    link.decode.submit("long", token_request(prompt(18), max_tokens=1))
    link.decode.submit("short", token_request(prompt(3, 9), max_tokens=3))
    assert [step(link.decode) for _ in range(3)] == [[("short", 3)], [("short", 1)], [("short", 1)]]
    link.carry_all()
    link.decode.finish_all()


def test_what_does_not_come_is_computed_here() -> None:
    link = linked()
    link.decode.submit("a", token_request(prompt(18), max_tokens=3))
    (transfer,) = link.open
    for _ in range(2):
        link.prefill.book()
        link.prefill.commit()
    link.carry(transfer, 2)
    link.end(transfer)  # the prefill engine has died
    assert step(link.decode) == [("a", 8)], "from the third page on"
    link.decode.finish_all()
    assert counter(link.decode, "page_fallbacks_total") == 1
    assert link.prefill.jobs["pages-shadow-0"].state.is_final, "nobody wants it any more"
    link.prefill.finish_all()


@pytest.mark.parametrize("reason", ["nobody", "no room", "no whole page", "scores"])
def test_a_prompt_is_not_fetched_where_that_is_no_use(reason: str) -> None:
    link = linked(num_pages=7 if reason == "no room" else 40)
    link.is_connected = reason != "nobody"
    length = 4 if reason == "no whole page" else 18
    request = token_request(prompt(length), max_tokens=1, prompt_logprobs=reason == "scores")
    link.decode.submit("a", request)
    assert not link.open
    link.decode.finish_all()
    is_missed = reason in ("nobody", "no room")
    assert counter(link.decode, "page_fallbacks_total") == is_missed


def test_a_cancelled_row_gives_up_its_fetch_and_the_prompt_is_not_computed_on() -> None:
    link = linked()
    link.decode.submit("a", token_request(prompt(18), max_tokens=1))
    link.prefill.book()
    link.decode.scheduler.cancel("a")
    assert not link.open
    assert link.decode.pool.num_leased == 0
    assert counter(link.decode, "page_fallbacks_total") == 0
    link.prefill.commit()
    link.prefill.finish_all()
    assert link.prefill.runner.num_computed_tokens == 8


@pytest.mark.parametrize(
    ("ids", "first", "num_pages", "reason"),
    [
        ((1, 50), 0, 1, "other tokens"),
        ((1, -1), 0, 1, "other tokens"),
        ((1, 2**62), 0, 1, "other tokens"),
        ((1,) * 9, 0, 3, "does not have"),
        ((1,) * 9, -1, 1, "does not have"),
        ((1,) * 9, 2, 1, "does not have"),
        ((1,) * 48, 0, 1, "context_length_exceeded"),
        ((), 0, 1, "invalid_request"),
    ],
)
def test_an_order_that_cannot_be_is_refused_by_itself(
    ids: tuple[int, ...], first: int, num_pages: int, reason: str
) -> None:
    link = linked()
    request = TokenRequest(prompt_ids=ids, sampling=SamplingParams(max_tokens=10**9))
    wanted = FetchPages(
        fetch_id=0, request=request, first=first, num_pages=num_pages, num_parts=num_pages
    )
    transfer = ManualTransfer(wanted)
    link.place(transfer)
    assert reason in transfer.reason
    assert link.transfers is not None
    link.transfers.close(transfer)  # type: ignore[arg-type]
    link.prefill.finish_all()


def test_an_order_ends_with_its_job() -> None:
    link = linked()
    link.decode.submit("a", token_request(prompt(18), max_tokens=1))
    link.prefill.book()
    link.prefill.commit()
    link.prefill.scheduler.cancel("pages-shadow-0")
    (transfer,) = link.open
    assert transfer.reason == "pages were evicted"
    link.carry_all()
    assert step(link.decode) == [("a", 8)]
    link.decode.finish_all()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_answer_is_right_and_every_page_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng)
    decode = world_of(rng, model)
    prefill = World(
        num_pages=rng.choice((10, 20, 40)),
        page_size=decode.pool.page_size,
        window=model["window"],
        num_window_rows=4,
        num_spare_windows=rng.choice((0, 20)),
        num_snapshots=rng.choice((3, 20)) if model["has_states"] else None,
        max_length=decode.max_length,
        depth=rng.choice((1, 2)),
        max_batch_size=4,
        max_batch_input_tokens=rng.choice((7, 16)),
        max_queue_size=8,
    )
    drive_pair(seed, 250, HandLink(decode, prefill))


def test_the_other_engine_gets_the_adapter_and_its_place() -> None:
    request = TokenRequest(prompt_ids=(1, 2), adapter="digest", adapter_place="/a.safetensors")
    asked = _prompt_of(request)
    assert (asked.adapter, asked.adapter_place) == (request.adapter, request.adapter_place)

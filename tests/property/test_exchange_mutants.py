"""Seeded faults of exchanges: would the random driver of two schedulers notice?"""

import random
from collections.abc import Callable

import pytest

from support.page_link import HandLink, drive_pair
from support.token_driver import random_world
from support.token_world import World
from triptych.core.kv.pages import Lease, PagePool
from triptych.core.kv.parts import PagePart
from triptych.schedulers.roles.page_exchange import FetchedPages, SentPages, _SentPrompt
from triptych.schedulers.tokens.page_fetches import OpenFetch

_STUMBLES = (AssertionError, KeyError, IndexError, ValueError)
_take, _end = FetchedPages._take, FetchedPages._end


def publishes_a_page_too_many(self: FetchedPages, awaited: OpenFetch, num_arrived: int) -> None:
    _take(self, awaited, min(num_arrived + 1, len(awaited.keys)))


def forgets_what_was_to_come(self: FetchedPages, awaited: OpenFetch) -> None:
    missing = set(awaited.keys[awaited.num_published :])
    _end(self, awaited)
    self._state.arriving.update(missing)


def gives_no_pages_back(self: FetchedPages, awaited: OpenFetch) -> None:
    self._state.pool.acquire()
    _end(self, awaited)


def sends_pages_that_nobody_holds(self: SentPages, sent: _SentPrompt) -> None:
    pool = self._state.pool
    found = pool.peek([key for _, key in sent.parts[sent.num_added :]])
    for page_id in found:
        sent.transfer.add([PagePart(sent.parts[sent.num_added][1], page_id)])
        sent.num_added += 1


def follows_without_holding(self: PagePool, lease: Lease, keys: list[bytes]) -> None:
    for page_id in self.peek(keys):
        lease.page_ids.append(page_id)
        lease.num_published += 1


_FAULTS: list[tuple[type, str, Callable[..., object]]] = [
    (FetchedPages, "_take", publishes_a_page_too_many),
    (FetchedPages, "_end", forgets_what_was_to_come),
    (FetchedPages, "_end", gives_no_pages_back),
    (SentPages, "_send", sends_pages_that_nobody_holds),
    (PagePool, "extend_cached", follows_without_holding),
]


@pytest.mark.parametrize(("owner", "name", "fault"), _FAULTS)
def test_the_driver_stumbles_over_a_fault(
    owner: type, name: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(_STUMBLES):  # noqa: PT012 (whichever world it is)
        for seed in range(20):
            decode = random_world(random.Random(seed))
            page_size, most = decode.pool.page_size, decode.max_length
            prefill = World(num_pages=40, page_size=page_size, max_length=most, max_queue_size=8)
            drive_pair(seed, 200, HandLink(decode, prefill))

"""Pages between two processes' ends: over TCP and shared memory, whole, in order, or not at all."""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from support import fake_nixl
from support.page_peers import (
    FORMAT,
    KEYS,
    PAGE_BYTES,
    SECRET,
    ByteMemory,
    Fetched,
    ManualTransfers,
    Pair,
    RawClient,
    RawServer,
    content,
    open_client,
    open_server,
    started,
    transfer,
    unix_address,
    until,
)
from triptych.core.errors import ConfigError
from triptych.core.kv.parts import PartKind
from triptych.core.kv.transfer.address import PageAddress, read_secret
from triptych.core.kv.transfer.messages import (
    DropFetch,
    FetchEnded,
    FetchPages,
    PageChallenge,
    PageCredit,
    PageGreeting,
    PageHeader,
    PageRefusal,
    PageWelcome,
)
from triptych.core.kv.transfer.shared_slots import IS_SUPPORTED, SharedSlots


@pytest.fixture(params=["tcp", "unix", "fake nixl", "nixl"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    if request.param == "fake nixl":
        monkeypatch.setitem(sys.modules, "nixl", fake_nixl)
    elif request.param == "nixl":
        pytest.importorskip("nixl")
    address = unix_address(tmp_path) if request.param == "unix" else "127.0.0.1:0"
    transport = "nixl" if "nixl" in request.param else "sockets"
    with closing(Pair(address, transport=transport)) as pair:
        yield pair
    assert not fake_nixl.AGENTS


async def test_pages_arrive_as_they_are_and_where_they_belong(pair: Pair) -> None:
    fetched = await pair.fetch(150, first=7)
    await until(lambda: fetched.num_ended)
    assert fetched.num_arrived == 150
    assert pair.memory.pages[7:157] == [content(key) for key in KEYS[7:157]]
    assert pair.memory.pages[6] == pair.memory.pages[157] == bytes(PAGE_BYTES)
    await until(lambda: pair.transfers.closed)
    assert pair.transfers.closed == pair.transfers.opened


async def test_bytes_on_the_wire_are_those_of_pages_and_little_else(pair: Pair) -> None:
    fetched = await pair.fetch(150)
    await until(lambda: fetched.num_ended and pair.transfers.closed)
    server, client = pair.server.counts, pair.client.counts
    num_bytes = server["page_sent_bytes_total"]  # nothing more is sent once a transfer is closed
    await until(lambda: client["page_received_bytes_total"] >= num_bytes)  # the end of the order
    assert client["page_received_bytes_total"] == num_bytes
    assert server["pages_sent_total"] == client["pages_received_total"] == 150
    assert 150 * PAGE_BYTES < num_bytes < 150 * (PAGE_BYTES + 90) + 1500  # headers, the welcome


async def test_pages_are_sent_while_the_rest_is_computed(pair: Pair) -> None:
    pair.transfers.is_instant = False
    fetched = await pair.fetch(5)
    await until(lambda: pair.transfers.opened)
    (taken,) = pair.transfers.opened
    pair.transfers.compute(taken, 2)
    await until(lambda: fetched.num_arrived == 2)
    assert not fetched.num_ended
    taken.end("overloaded")
    await until(lambda: fetched.num_ended)
    assert fetched.num_arrived == 2


async def test_several_fetches_share_a_connection(pair: Pair) -> None:
    fetches = [await pair.fetch(20, first=20 * n) for n in range(8)]
    await until(lambda: all(each.num_ended for each in fetches))
    assert [each.num_arrived for each in fetches] == [20] * 8
    assert pair.memory.pages[:160] == [content(key) for key in KEYS[:160]]


async def test_a_fetch_that_is_stopped_ends_and_writes_nothing_more(pair: Pair) -> None:
    pair.transfers.is_instant = False
    stopped, other = await pair.fetch(5), await pair.fetch(5, first=50)
    await until(lambda: len(pair.transfers.opened) == 2)
    pair.client.stop(stopped.fetch)
    await until(lambda: stopped.num_ended)
    await until(lambda: len(pair.transfers.closed) == 1)
    for each in pair.transfers.opened:
        pair.transfers.compute(each, 5)
    await until(lambda: other.num_ended)
    assert (stopped.num_arrived, other.num_arrived) == (0, 5)
    assert pair.memory.pages[0] == bytes(PAGE_BYTES)


async def test_a_server_that_dies_ends_fetches_and_one_that_returns_is_used(
    tmp_path: Path,
) -> None:
    address = unix_address(tmp_path)
    with closing(Pair(address)) as pair:
        pair.transfers.is_instant = False
        fetched = await pair.fetch(5)
        await until(lambda: pair.transfers.opened)
        pair.transfers.compute(pair.transfers.opened[0], 3)
        await until(lambda: fetched.num_arrived == 3)
        pair.server.close()
        await until(lambda: fetched.num_ended)
        assert fetched.num_arrived == 3
        assert pair.transfers.closed == pair.transfers.opened
        await until(lambda: not pair.client.is_connected)
        late = Fetched(2)
        pair.client.start(late.fetch)
        await until(lambda: late.num_ended)
        pair.server = open_server(address, pair.server.memories[PartKind.FULL])  # type: ignore[arg-type]
        pair.server.start(ManualTransfers(pair.server.memories[PartKind.FULL]))  # type: ignore[arg-type]
        again = await pair.fetch(5)
        await until(lambda: again.num_ended)
        assert again.num_arrived == 5


async def test_a_fault_at_the_end_of_a_fetch_is_not_that_of_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError("a fault")

    with closing(Pair(unix_address(tmp_path), timeout_s=600.0)) as pair:
        pair.transfers.is_instant = False
        bad, good = await pair.fetch(2), await pair.fetch(2, first=9)
        bad.fetch.ended = fail
        await until(lambda: len(pair.transfers.opened) == 2)
        pair.server.close()
        await until(lambda: good.num_ended)


async def test_the_engine_with_the_least_to_send_is_asked(tmp_path: Path) -> None:
    with closing(Pair(unix_address(tmp_path))) as one, closing(Pair("127.0.0.1:0")) as two:
        both = open_client(unix_address(tmp_path), f"127.0.0.1:{two.server.port}")
        with closing(both):
            await until(lambda: both.counts["page_links"] == 2)
            one.transfers.is_instant = two.transfers.is_instant = False
            for _ in range(4):
                both.start(Fetched(3).fetch)
            await until(lambda: len(one.transfers.opened) == len(two.transfers.opened) == 2)


# Who may connect.


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"secret": b"another secret of theirs"}, "secret"),
        ({"page_format": msgspec.structs.replace(FORMAT, weights="11")}, "weights: 00 here"),
        ({"page_format": msgspec.structs.replace(FORMAT, layout="fp8")}, "layout: tiny here"),
        (
            {"page_format": msgspec.structs.replace(FORMAT, order="native")},
            "order: torch here",
        ),
        ({"page_format": msgspec.structs.replace(FORMAT, transport="nixl")}, "transport: sockets"),
        ({"page_format": msgspec.structs.replace(FORMAT, content="features")}, "content: pages"),
    ],
)
async def test_a_peer_that_does_not_fit_is_refused_with_a_reason(
    given: dict[str, object], code: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = unix_address(tmp_path)
    with closing(Pair(address)) as pair, closing(open_client(address, **given)) as stranger:
        await until(lambda: code in caplog.text)
        assert "refused" in caplog.text
        assert not stranger.is_connected
        fetched = await pair.fetch(2)  # the others do not notice
        await until(lambda: fetched.num_ended)
        assert fetched.num_arrived == 2


def test_a_server_that_does_not_know_the_secret_gets_no_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RawServer() as server, closing(open_client(server.address)) as client:
        server.accept()
        server.send(PageChallenge(secrets.token_bytes(32)))
        server.receive(PageGreeting)
        server.send(PageWelcome(b"0" * 32))
        with pytest.raises(ConnectionError):
            server.receive(FetchPages)
        assert not client.is_connected
    assert "the secrets of --pipeline-key-file differ" in caplog.text


@pytest.mark.parametrize("text", ["", "8000", "host:", ":80", "host:port", "host:70000", "unix:"])
def test_a_wrong_address_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write HOST:PORT, or unix:PATH"):
        PageAddress.parse(text)


def test_addresses_read_as_they_were_written() -> None:
    for text in ("host:80", "[::1]:80", "unix:/run/pages"):
        assert str(PageAddress.parse(text)) == text


def test_an_address_in_use_is_refused_and_a_socket_that_was_left_is_taken(tmp_path: Path) -> None:
    address = PageAddress.parse(unix_address(tmp_path))
    with address.listen(), pytest.raises(ConfigError, match="Address already in use"):
        address.listen()
    with address.listen():  # the file of the closed one is still there
        assert Path(address.path).stat().st_mode & 0o777 == 0o600


def test_a_secret_is_read_without_its_line_end_and_has_a_length(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16 to"):
        read_secret(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "none"))


# Peers that break the rules. They know the secret: a stranger gets no further than the greeting.


RUBBISH = {
    "no message": [b"\x04\0\0\0abcd"],
    "too long": [b"\xff\xff\xff\xff"],
    "empty": [b"\0\0\0\0"],
    "nested": [struct.pack("<I", 5000) + b"\x91" * 5000],
    "another's message": [FetchEnded(0)],
    "a credit too many": [PageCredit()],
    "a slot": [PageCredit(3)],
    "twice the same fetch": [transfer(), transfer()],
}


@pytest.mark.parametrize("sent", RUBBISH.values(), ids=RUBBISH)
async def test_a_client_that_breaks_the_rules_is_let_go_of_alone(sent: list[object]) -> None:
    with closing(Pair("127.0.0.1:0")) as pair, RawClient() as peer:
        pair.transfers.is_instant = False
        peer.greet(pair.server.port)
        peer.receive(PageWelcome)
        for each in sent:
            peer.send_raw(each) if isinstance(each, bytes) else peer.send(each)
        assert await asyncio.to_thread(peer.is_closed)
        await until(lambda: len(pair.transfers.closed) == len(pair.transfers.opened))
        pair.transfers.is_instant = True
        fetched = await pair.fetch(2)
        await until(lambda: fetched.num_ended)
        assert fetched.num_arrived == 2


async def test_a_client_that_takes_nothing_gets_its_credits_and_is_let_go_of() -> None:
    with closing(Pair("127.0.0.1:0", timeout_s=0.3)) as pair, RawClient() as peer:
        peer.greet(pair.server.port, num_credits=4)
        peer.receive(PageWelcome)
        peer.send(transfer())
        assert await asyncio.to_thread(peer.is_closed)
        assert pair.server.counts["pages_sent_total"] == 4
        await until(lambda: pair.transfers.closed == pair.transfers.opened)


async def test_an_order_that_is_dropped_is_closed() -> None:
    with closing(Pair("127.0.0.1:0")) as pair, RawClient() as peer:
        pair.transfers.is_instant = False
        peer.greet(pair.server.port)
        peer.receive(PageWelcome)
        peer.send(transfer(7))
        peer.send(DropFetch(7))
        peer.send(DropFetch(8))
        assert peer.receive(FetchEnded) == FetchEnded(7, "dropped")
        await until(lambda: pair.transfers.closed == pair.transfers.opened)


@pytest.mark.parametrize("num_credits", [0, -1, 10**9])
def test_credits_have_bounds(num_credits: int) -> None:
    with closing(Pair("127.0.0.1:0")) as pair, RawClient() as peer:
        peer.greet(pair.server.port, num_credits=num_credits)
        refusal = peer.receive(PageRefusal)
        assert isinstance(refusal, PageRefusal)
        assert refusal.code == "format"


def header(fetch_id: int, key: bytes = KEYS[0], **more: int) -> PageHeader:
    return PageHeader(**{"fetch_id": fetch_id, "key": key, "num_bytes": PAGE_BYTES} | more)  # type: ignore[arg-type]


LIES = {
    "a shorter page": lambda fetch_id: [header(fetch_id, num_bytes=9), bytes(9)],
    "an empty page": lambda fetch_id: [header(fetch_id, num_bytes=0)],
    "a longer page": lambda fetch_id: [header(fetch_id, num_bytes=1025), bytes(1025)],
    "another page": lambda fetch_id: [header(fetch_id, key=KEYS[1]), bytes(1024)],
    "a slot": lambda fetch_id: [header(fetch_id, slot=9)],
    "rubbish": lambda _: [b"\x04\0\0\0abcd"],
    "a large frame": lambda _: [struct.pack("<I", 10**6)],
    "a second welcome": lambda _: [PageWelcome(b"")],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_server_that_breaks_the_rules_ends_its_fetches(lie: object) -> None:
    memory = ByteMemory()
    with RawServer() as server, closing(open_client(server.address, memory=memory)) as client:
        await asyncio.to_thread(server.let_in)
        fetched = await started(client)
        wanted = await asyncio.to_thread(server.receive, FetchPages)
        assert isinstance(wanted, FetchPages)
        for each in lie(wanted.fetch_id):  # type: ignore[operator]
            server.send_raw(each) if isinstance(each, bytes) else server.send(each)
        await until(lambda: fetched.num_ended)
        assert (fetched.num_arrived, memory.pages[0]) == (0, bytes(PAGE_BYTES))
        await asyncio.to_thread(server.let_in)  # it tries again
        await until(lambda: client.is_connected)


async def test_a_server_that_stalls_costs_a_wait_and_the_connection() -> None:
    with RawServer() as server, closing(open_client(server.address, timeout_s=0.2)) as client:
        await asyncio.to_thread(server.let_in)
        fetched = await started(client)
        await until(lambda: fetched.num_ended)
        assert await asyncio.to_thread(server.is_closed)
        await until(lambda: not client.is_connected)


@pytest.mark.skipif(not IS_SUPPORTED, reason="Linux's")
def test_shared_memory_that_could_shrink_is_not_taken() -> None:
    slots, descriptor = SharedSlots.make(2, 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 100)
    assert SharedSlots.take(os.dup(descriptor), 3, 4096) is None
    taken = SharedSlots.take(descriptor, 2, 4096)
    assert taken is not None
    taken.slot(1)[:3] = b"abc"
    assert slots.slot(1)[:4] == b"abc\0"
    bare = os.memfd_create("unsealed")
    os.ftruncate(bare, 2 * 4096)
    assert SharedSlots.take(bare, 2, 4096) is None


def test_threads_end_with_both_ends(tmp_path: Path) -> None:
    Pair(unix_address(tmp_path)).close()
    assert not list(tmp_path.iterdir()), "the socket's file goes with the server"
    assert not [thread for thread in threading.enumerate() if thread.name == "triptych-pages"]

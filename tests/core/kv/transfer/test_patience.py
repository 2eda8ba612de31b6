"""How long ends wait for each other, what they ask of each other at most, and what they leave."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from support.page_peers import (
    Fetched,
    Pair,
    RawClient,
    RawServer,
    open_client,
    started,
    transfer,
    unix_address,
    until,
)
from triptych.core.errors import ConfigError
from triptych.core.kv.transfer import client as client_module
from triptych.core.kv.transfer import server as server_module
from triptych.core.kv.transfer.address import PageAddress
from triptych.core.kv.transfer.channel import BadPeer, PageChannel
from triptych.core.kv.transfer.messages import (
    DropFetch,
    FetchEnded,
    FetchPages,
    PageCredit,
    PageWelcome,
)
from triptych.core.kv.transfer.shared_slots import IS_SUPPORTED


async def test_a_server_that_is_busy_keeps_its_connection() -> None:
    with RawServer() as server, closing(open_client(server.address, timeout_s=1.0)) as client:
        await asyncio.to_thread(server.let_in)
        fetched = await started(client)
        wanted = await asyncio.to_thread(server.receive, FetchPages)
        assert await asyncio.to_thread(server.receive, DropFetch) == DropFetch(wanted.fetch_id)
        server.send(FetchEnded(wanted.fetch_id, "dropped"))
        await until(lambda: fetched.num_ended)
        await asyncio.sleep(1.2)  # longer than an answer may take
        await started(client)
        await asyncio.to_thread(server.receive, FetchPages)  # by the same connection


@pytest.fixture
def rests(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """How long peers were not asked, as the log says."""
    caplog.set_level(logging.INFO, logger=client_module.__name__)

    def found() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [text.partition("no fetches for ")[2] for text in said if "are late" in text]

    return found


async def _late(pair: Pair) -> None:
    """Ask as soon as that may be; nothing comes."""
    fetched = await pair.fetch(3)
    await until(lambda: fetched.num_ended)
    assert not fetched.num_arrived


async def test_who_is_late_is_asked_again_after_twice_as_long_each_time(
    rests: Callable[[], list[str]],
) -> None:
    with closing(Pair("127.0.0.1:0", timeout_s=0.4)) as pair:
        pair.transfers.is_instant = False
        for _ in range(3):
            await _late(pair)
            assert not pair.client.is_connected, "it rests"
        assert rests() == ["0.4 s", "0.8 s", "1.6 s"]
        pair.transfers.is_instant = True
        came = await pair.fetch(3)
        await until(lambda: came.num_ended)
        assert came.num_arrived == 3
        pair.transfers.is_instant = False
        await _late(pair)
        assert rests()[3:] == ["0.4 s"], "what came made up for it"


async def test_who_was_late_is_tried_with_one(tmp_path: Path) -> None:
    late, prompt = Pair(unix_address(tmp_path), timeout_s=30.0), Pair("127.0.0.1:0")
    with closing(late), closing(prompt):
        late.transfers.is_instant = prompt.transfers.is_instant = False
        addresses = unix_address(tmp_path), f"127.0.0.1:{prompt.server.port}"
        with closing(open_client(*addresses, timeout_s=1.0)) as both:
            await until(lambda: both.counts["page_links"] == 2)

            async def fetch_all() -> int:
                """Eight at once; returns how many came."""
                fetched = [Fetched(3, first=3 * n) for n in range(8)]
                for each in fetched:
                    both.start(each.fetch)
                if not prompt.transfers.is_instant:  # both are asked before either answers
                    await until(lambda: len(late.transfers.opened + prompt.transfers.opened) == 8)
                    prompt.transfers.is_instant = True
                    for asked in prompt.transfers.opened:
                        prompt.transfers.compute(asked, asked.wanted.num_pages)
                await until(lambda: all(each.num_ended for each in fetched))
                return sum(each.num_arrived == 3 for each in fetched)

            num_came = await fetch_all()
            num_late = len(late.transfers.opened)
            assert (num_came, num_late > 1) == (8 - num_late, True), "both are asked"
            assert await fetch_all() == 8, "one rests"
            assert len(late.transfers.opened) == num_late
            await asyncio.sleep(1.0)
            assert await fetch_all() == 7, "one is tried"
            assert len(late.transfers.opened) == num_late + 1


async def test_who_connects_again_and_still_hangs_is_asked_ever_less(
    rests: Callable[[], list[str]],
) -> None:
    with RawServer() as server, closing(open_client(server.address, timeout_s=0.3)) as client:
        for _ in range(3):  # a drop that is not answered ends the connection
            await asyncio.to_thread(server.let_in)
            fetched = await started(client)
            await asyncio.to_thread(server.receive, FetchPages)
            await until(lambda each=fetched: each.num_ended)
        assert rests() == ["0.3 s", "0.6 s", "1.2 s"]


async def test_connections_that_say_nothing_keep_no_peer_out() -> None:
    """However many there are: the oldest go, and no engine that was let in goes with them."""
    with closing(Pair("127.0.0.1:0")) as pair, ExitStack() as ending:
        await until(lambda: pair.client.is_connected)
        where = ("127.0.0.1", pair.server.port)
        for round_ in range(3):
            silent = [ending.enter_context(socket.create_connection(where)) for _ in range(100)]
            peer = ending.enter_context(RawClient())
            peer.greet(pair.server.port)
            peer.receive(PageWelcome)
            silent[0].settimeout(10.0)
            while silent[0].recv(4096):  # the challenge, and then its end
                pass
            await until(lambda count=round_ + 2: pair.server.counts["page_links"] == count)
        assert pair.client.is_connected


def test_who_floods_makes_way_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet host's only connection stays, though it is the oldest."""
    monkeypatch.setattr(server_module, "_MAX_UNAUTHENTICATED", 4)
    with closing(Pair("127.0.0.1:0")) as pair, ExitStack() as ending:

        def connected(host: str) -> socket.socket:
            where = ("127.0.0.1", pair.server.port)
            made = socket.create_connection(where, timeout=10.0, source_address=(host, 0))
            return ending.enter_context(made)

        quiet = connected("127.0.0.2")
        assert quiet.recv(4096)
        for _ in range(20):
            assert connected("127.0.0.1").recv(4096)
        quiet.setblocking(False)
        with pytest.raises(BlockingIOError):
            quiet.recv(1)


async def test_a_client_that_takes_pages_slowly_keeps_its_connection() -> None:
    """The last of five transfers waits longer for a credit than a page may take."""
    with closing(Pair("127.0.0.1:0", timeout_s=3.0)) as pair, RawClient() as peer:
        peer.greet(pair.server.port, num_credits=1)
        peer.receive(PageWelcome)
        for fetch_id in range(5):
            peer.send(transfer(fetch_id, num_pages=1))
        for _ in range(5):
            await asyncio.to_thread(peer.receive_page)
            await asyncio.sleep(0.7)
            peer.send(PageCredit())
        await until(lambda: len(pair.transfers.closed) == 5)
        assert pair.server.counts["pages_sent_total"] == 5
        await until(lambda: pair.server.counts["page_links"] == 2)


async def test_no_more_is_asked_for_than_the_other_end_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MAX_TRANSFERS", 2)
    with closing(Pair("127.0.0.1:0")) as pair:
        pair.transfers.is_instant = False
        first, second, third = [await pair.fetch(3) for _ in range(3)]
        await until(lambda: third.num_ended)
        assert not first.num_ended + second.num_ended
        pair.client.stop(first.fetch)
        await until(lambda: pair.transfers.closed)
        taken: list[Fetched] = []

        async def is_taken() -> bool:
            taken.append(await pair.fetch(3))
            await asyncio.sleep(0.05)
            return not taken[-1].num_ended

        async with asyncio.timeout(20.0):
            while not await is_taken():
                pass
        assert not second.num_ended


async def test_a_request_that_is_too_large_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(Pair("127.0.0.1:0")) as pair:
        pair.transfers.is_instant = False
        other = await pair.fetch(3)
        await until(lambda: pair.transfers.opened)
        monkeypatch.setattr(client_module, "MAX_REQUEST_BYTES", 8)
        large = await pair.fetch(3)
        await until(lambda: large.num_ended)
        pair.transfers.compute(pair.transfers.opened[0], 3)
        await until(lambda: other.num_ended)
        assert (large.num_arrived, other.num_arrived, len(pair.transfers.opened)) == (0, 3, 1)


@pytest.mark.skipif(not IS_SUPPORTED, reason="Linux's")
async def test_open_files_that_were_not_asked_for_are_closed() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with ours, theirs:
        ours.setblocking(False)
        socket.send_fds(theirs, [b"\1"], [writer, writer])
        os.close(writer)
        with pytest.raises(BadPeer):
            await PageChannel(ours, Counter()).receive_descriptor()
        assert os.read(reader, 1) == b"", "nobody can write to it any more"
    os.close(reader)


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = closed.getsockname()[1], server.getsockname()[1]
        _resolve_to(monkeypatch, *ports)
        with await PageAddress.parse("host:1").connect() as connected:
            assert connected.getpeername()[1] == ports[1]
        _resolve_to(monkeypatch, ports[0])
        with pytest.raises(ConnectionRefusedError):
            await PageAddress.parse("host:1").connect()


def test_an_unknown_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolve_to(monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot listen .Name or service"):
        PageAddress.parse("host:1").listen()

"""Pages that cross by NIXL: what becomes of them when it is not there, or fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from support import fake_nixl
from support.page_peers import (
    FORMAT,
    ByteMemory,
    ManualTransfers,
    Pair,
    RawClient,
    RawServer,
    open_client,
    open_server,
    until,
)
from triptych.core.errors import ConfigError
from triptych.core.kv.parts import PartKind
from triptych.core.kv.transfer.messages import NixlRegion
from triptych.core.kv.transfer.nixl_slots import OfferedSlots, ReadSlots, check_nixl

MET = msgspec.structs.replace(FORMAT, transport="nixl")


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "nixl", fake_nixl)
    yield fake_nixl
    assert not fake_nixl.AGENTS


def test_without_nixl_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"^--pipeline-transport nixl: .*'\.\[nixl\]'"):
        check_nixl()


async def test_a_slot_is_read_as_far_as_it_was_filled() -> None:
    offered = OfferedSlots(3, 100)
    with closing(offered), closing(ReadSlots(3, 100, offered.region)) as reading:
        offered.slot(1)[:] = bytes(range(100))
        lent = asyncio.Event()
        lent.set()
        carrying = asyncio.create_task(offered.drive_progress(lent))
        await reading.read_slot(1, 40)
        carrying.cancel()
    assert bytes(reading.slot(1)) == bytes(range(40)) + bytes(60)
    assert not any(reading.slot(0)) and not any(reading.slot(2))  # noqa: PT018


async def test_no_progress_is_made_while_nothing_is_lent() -> None:
    with closing(Pair("127.0.0.1:0", transport="nixl")) as pair:
        fetched = await pair.fetch(20)
        await until(lambda: fetched.num_ended)
        assert fetched.num_arrived == 20
        numbers = []
        for _ in range(2):
            await asyncio.sleep(0.02)
            numbers.append(max(agent.num_progressed for agent in fake_nixl.AGENTS.values()))
        assert numbers[0] == numbers[1] > 0


async def test_an_agent_that_dies_ends_the_fetch_and_the_next_connection_serves() -> None:
    with closing(Pair("127.0.0.1:0", transport="nixl")) as pair:
        pair.transfers.is_instant = False
        fetched = await pair.fetch(3)
        await until(lambda: pair.transfers.opened)
        fake_nixl.DEAD.update(fake_nixl.AGENTS)
        pair.transfers.compute(pair.transfers.opened[0], 3)
        await until(lambda: fetched.num_ended)
        assert fetched.num_arrived == 0
        pair.transfers.is_instant = True
        again = await pair.fetch(3)
        await until(lambda: again.num_ended)
        assert again.num_arrived == 3


async def test_a_read_that_is_cancelled_is_ended() -> None:
    offered = OfferedSlots(1, 100)
    with closing(offered), closing(ReadSlots(1, 100, offered.region)) as reading:
        arriving = asyncio.create_task(reading.read_slot(0, 100))
        await asyncio.sleep(0)
        arriving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await arriving
        (handle,) = (h for agent in fake_nixl.AGENTS.values() for h in agent.handles)
        assert handle.is_released


@pytest.mark.parametrize("region", [None, NixlRegion(b"\xff", 0)])
async def test_a_server_without_regions_is_released(region: NixlRegion | None) -> None:
    with RawServer() as server, closing(open_client(server.address, page_format=MET)) as client:
        await asyncio.to_thread(server.let_in, region)
        assert await asyncio.to_thread(server.is_closed)
        assert not client.is_connected


async def test_slots_that_cannot_be_announced_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> bytes:
        raise RuntimeError("no metadata")

    monkeypatch.setattr(fake_nixl.nixl_agent, "get_agent_metadata", fail)
    server = open_server("127.0.0.1:0", ByteMemory(), transport="nixl")
    with closing(server), RawClient() as peer:
        server.start(ManualTransfers(server.memories[PartKind.FULL]))  # type: ignore[arg-type]
        peer.greet(server.port, format=MET)
        assert await asyncio.to_thread(peer.is_closed)
        assert not fake_nixl.AGENTS

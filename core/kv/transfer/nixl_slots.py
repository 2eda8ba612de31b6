"""Page slots for NIXL: memory of the sending end, which the receiving end reads.

Owns both ends' NIXL agents, a pair for each connection: closing an agent ends all its transfers, so
nothing is written to memory that another connection uses. With RDMA, reading costs the sending end
nothing; without, UCX emulates it and both ends must drive progress by calls, because NIXL's own
progress threads would spin. Knows no messages except the region of the slots.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from triptych.core.errors import ConfigError
from triptych.core.kv.transfer.messages import NixlRegion

_HOST = "DRAM"
_POLL_S = 0.0003
_MOST_POLL_S = 0.002
_NUM_EAGER_POLLS = 20
_log = logging.getLogger(__name__)


def check_nixl() -> None:
    """Raises `ConfigError` where NIXL is not installed."""
    try:
        _nixl()
    except ImportError as error:
        raise ConfigError(
            f"--pipeline-transport nixl: NIXL cannot be loaded ({error}); run pip install"
            " '.[nixl]' in a clone of Triptych, or omit the option."
        ) from error


class _NixlMemory:
    """Slots registered with their own agent. Raises `ConnectionError`."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._memory = np.zeros(num_slots * slot_bytes, dtype=np.uint8)
        self._view = self._memory.data
        with _connection_errors():
            nixl = _nixl()
            config = nixl.nixl_agent_config(enable_prog_thread=False)
            self._agent: Any = nixl.nixl_agent(f"triptych-{uuid.uuid4()}", config)
            region = (self._address(0), self._memory.nbytes, 0, "")
            self._registered: Any = self._agent.register_memory([region], _HOST)

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        assert 0 <= index < self.num_slots, "no such slot"
        return self._view[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def close(self) -> None:
        """End all transfers; the peer cannot access the memory after this."""
        try:
            with _connection_errors():
                self._agent.deregister_memory(self._registered)
        except ConnectionError as error:
            _log.info("%s", error)
        del self._agent, self._registered

    def _address(self, index: int) -> int:
        return int(self._memory.ctypes.data) + index * self._slot_bytes


class OfferedSlots(_NixlMemory):
    """The sending end's slots."""

    @property
    def region(self) -> NixlRegion:
        """The region that the other end reads. Raises `ConnectionError`."""
        with _connection_errors():
            return NixlRegion(self._agent.get_agent_metadata(), self._address(0))

    async def drive_progress(self, has_in_flight: asyncio.Event) -> None:
        """Drive NIXL's progress, forever, while the other end may be reading slots."""
        while True:
            await has_in_flight.wait()
            with _connection_errors():
                self._agent.get_new_notifs()
            await asyncio.sleep(_POLL_S)


class ReadSlots(_NixlMemory):
    """The receiving end's copies of the slots in `region`."""

    def __init__(self, num_slots: int, slot_bytes: int, region: NixlRegion) -> None:
        super().__init__(num_slots, slot_bytes)
        self._there = region.address
        try:
            with _connection_errors():
                self._peer: Any = self._agent.add_remote_agent(region.metadata)
        except ConnectionError:
            super().close()
            raise

    async def read_slot(self, index: int, num_bytes: int) -> None:
        """Read the first bytes of a slot. Raises `ConnectionError`."""
        place = index * self._slot_bytes
        with _connection_errors():
            here, there = (
                self._agent.get_xfer_descs([(address, num_bytes, 0)], _HOST)
                for address in (self._address(index), self._there + place)
            )
            handle = self._agent.initialize_xfer("READ", here, there, self._peer)
        try:
            if await self._state_at_end(handle) != "DONE":
                raise ConnectionError("NIXL could not read a page")
        finally:  # a cancelled transfer must not write to this memory later
            with suppress(ConnectionError), _connection_errors():
                self._agent.release_xfer_handle(handle)

    async def _state_at_end(self, handle: Any) -> str:
        """Run a transfer and return its final state. Raises `ConnectionError`."""
        with _connection_errors():
            state: str = self._agent.transfer(handle)
        for wait_s in _waits():
            if state != "PROC":
                break
            await asyncio.sleep(wait_s)
            with _connection_errors():
                state = self._agent.check_xfer_state(handle)
        return state

    def close(self) -> None:
        """Disconnect from the other end, and end all transfers."""
        try:
            with _connection_errors():
                self._agent.remove_remote_agent(self._peer)
        except ConnectionError as error:
            _log.info("%s", error)
        super().close()


def _waits() -> Iterator[float]:
    """The waits between polls: first none, then growing ones."""
    yield from itertools.repeat(0.0, _NUM_EAGER_POLLS)
    wait_s = _POLL_S / 4
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _MOST_POLL_S)


def _nixl() -> Any:
    module = importlib.import_module("nixl")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs each agent to stdout
    return module


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Turn NIXL's errors, which have no common base class, into `ConnectionError`."""
    try:
        yield
    except Exception as error:
        raise ConnectionError(f"NIXL: {type(error).__name__}: {error!s:.200}") from error

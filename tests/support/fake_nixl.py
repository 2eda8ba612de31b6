"""NIXL as far as pages need it, within this process: agents that copy each other's memory.

A transfer is under way until its agent, or the one that is read, was looked at a few times: as
where UCX emulates what a network cannot do by itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

NUM_LOOKS = 3


class nixlRemoteDisconnectError(Exception):  # noqa: N801 (NIXL's name)
    """The other agent is gone."""


@dataclass
class Handle:
    here: list[tuple[int, int, int]]
    there: list[tuple[int, int, int]]
    peer: str
    num_looks: int = 0
    is_released: bool = False


def nixl_agent_config(*, enable_prog_thread: bool) -> None:
    assert not enable_prog_thread, "its threads spin"


@dataclass
class nixl_agent:  # noqa: N801 (NIXL's name)
    name: str
    config: None
    regions: list[tuple[int, int]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    num_progressed: int = 0

    def __post_init__(self) -> None:
        AGENTS[self.name] = self

    def register_memory(self, regions: list[Any], kind: str) -> list[Any]:
        assert kind == "DRAM"
        self.regions += [(address, length) for address, length, _, _ in regions]
        return regions

    def deregister_memory(self, regions: list[Any]) -> None:
        assert all(handle.is_released for handle in self.handles), "it may be written to yet"
        self.regions.clear()
        del AGENTS[self.name]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, peer: str) -> None: ...

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.num_progressed += 1
        return {}

    def get_xfer_descs(self, places: list[Any], kind: str) -> list[Any]:
        assert kind == "DRAM"
        return places

    def initialize_xfer(self, kind: str, here: list[Any], there: list[Any], peer: str) -> Handle:
        assert kind == "READ"
        self.handles.append(Handle(here, there, peer))
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Handle) -> str:
        if handle.peer not in AGENTS or handle.peer in DEAD:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        peer = AGENTS[handle.peer]
        handle.num_looks += 1
        if handle.num_looks < NUM_LOOKS or not peer.num_progressed:
            return "PROC"
        for (here, num_bytes, _), (there, length, _) in zip(handle.here, handle.there, strict=True):
            assert num_bytes == length
            assert any(a <= here and here + num_bytes <= a + n for a, n in self.regions)
            assert any(a <= there and there + length <= a + n for a, n in peer.regions)
            ctypes.memmove(here, there, num_bytes)
        return "DONE"

    def release_xfer_handle(self, handle: Handle) -> None:
        handle.is_released = True


AGENTS: dict[str, nixl_agent] = {}
DEAD: set[str] = set()
"""Agents whose process is gone, as far as others can see."""

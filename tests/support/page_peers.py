"""Both ends of a connection for pages, over bytes, and prompts that a test computes."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.keys import page_key, root_key
from triptych.core.kv.parts import PagePart, PartKind
from triptych.core.kv.transfer.address import PageAddress
from triptych.core.kv.transfer.client import PageClient, PageFetch
from triptych.core.kv.transfer.messages import (
    FetchEnded,
    FetchPages,
    NixlRegion,
    PageChallenge,
    PageFormat,
    PageGreeting,
    PageHeader,
    PageWelcome,
    encode,
    proof,
)
from triptych.core.kv.transfer.server import PageServer, PageTransferRequest

PAGE_BYTES = 1024
SECRET = b"sixteen bytes or more"
FORMAT = PageFormat(
    weights="00", layout="tiny", order="torch", compute="float32", max_length=64, page_bytes=1024
)
KEYS = [page_key(root_key(b"weights"), (n,)) for n in range(200)]
_ids = itertools.count()


def content(key: bytes) -> bytes:
    """What the page of a key holds."""
    return (key * (PAGE_BYTES // len(key)))[:PAGE_BYTES]


class ByteMemory:
    """Pages as bytes. Implements `PageMemory`."""

    page_bytes = PAGE_BYTES

    def __init__(self, num_pages: int = 200) -> None:
        self.pages = [bytes(PAGE_BYTES)] * num_pages

    def num_bytes(self, page_id: int) -> int:
        return self.page_bytes

    def read(self, page_id: int, buffer: memoryview) -> None:
        buffer[:] = self.pages[page_id]

    def write(self, page_id: int, buffer: memoryview) -> None:
        self.pages[page_id] = bytes(buffer)


@dataclass
class ManualTransfers:
    """Prompts that are computed when a test says so. Implements `PageTransferHandler`."""

    memory: ByteMemory
    is_instant: bool = True
    opened: list[PageTransferRequest] = field(default_factory=list)
    closed: list[PageTransferRequest] = field(default_factory=list)

    def open(self, transfer: PageTransferRequest) -> None:
        self.opened.append(transfer)
        if self.is_instant:
            self.compute(transfer, transfer.wanted.num_pages)

    def close(self, transfer: PageTransferRequest) -> None:
        self.closed.append(transfer)

    def compute(self, transfer: PageTransferRequest, num_pages: int) -> None:
        """The first pages are there; a page's number is its place in the prompt."""
        first = transfer.wanted.first
        for n in range(first, first + num_pages):
            self.memory.pages[n] = content(KEYS[n])
        transfer.add([PagePart(KEYS[n], n) for n in range(first, first + num_pages)])


class Fetched:
    """A fetch of pages to the page of the same number, and what came of it."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        self.num_arrived = 0
        self.num_ended = 0
        self.fetch = PageFetch(
            fetch_id=next(_ids),
            request=TokenRequest(prompt_ids=(1, 2, 3)),
            first=first,
            num_pages=num_pages,
            parts=[PagePart(KEYS[n], n) for n in range(first, first + num_pages)],
            arrived=self._arrive,
            ended=self._end,
        )

    def _arrive(self, num: int) -> None:
        assert not self.num_ended
        assert num == self.num_arrived + 1
        self.num_arrived = num

    def _end(self) -> None:
        self.num_ended += 1


def open_server(
    address: str,
    memory: ByteMemory,
    secret: bytes = SECRET,
    timeout_s: float = 5.0,
    transport: str = "sockets",
) -> PageServer:
    met = msgspec.structs.replace(FORMAT, transport=transport)
    memories = {PartKind.FULL: memory}
    return PageServer(PageAddress.parse(address), secret, met, memories, timeout_s=timeout_s)


def open_client(*addresses: str, memory: ByteMemory | None = None, **more: Any) -> PageClient:
    given = {"secret": SECRET, "page_format": FORMAT, "timeout_s": 5.0} | more
    found = [PageAddress.parse(address) for address in addresses]
    return PageClient(found, memories={PartKind.FULL: memory or ByteMemory()}, **given)


async def until(condition: Callable[[], object]) -> None:
    """Wait, within bounds, for what another thread does."""
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110 (the other side has no event to wait for)
            await asyncio.sleep(0.002)


def unix_address(folder: Path) -> str:
    return f"unix:{folder}/pages"


class Pair:
    """A server with its transfers, and a client, connected."""

    def __init__(self, address: str, timeout_s: float = 5.0, transport: str = "sockets") -> None:
        memory = ByteMemory()
        self.server = open_server(address, memory, timeout_s=timeout_s, transport=transport)
        self.transfers = ManualTransfers(memory)
        self.server.start(self.transfers)
        address = address.replace(":0", f":{self.server.port}") if ":0" in address else address
        self.memory = ByteMemory()
        met = self.server.format
        self.client = open_client(address, memory=self.memory, timeout_s=timeout_s, page_format=met)

    async def fetch(self, num_pages: int, first: int = 0) -> Fetched:
        await until(lambda: self.client.is_connected)
        fetched = Fetched(num_pages, first)
        self.client.start(fetched.fetch)
        return fetched

    def close(self) -> None:
        self.client.close()
        self.server.close()


async def started(client: PageClient) -> Fetched:
    await until(lambda: client.is_connected)
    fetched = Fetched(3)
    client.start(fetched.fetch)
    return fetched


class RawPeer:
    """An end of a connection that sends what a test wants."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(10.0)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: object) -> None:
        frame = encode(message)
        self.send_raw(struct.pack("<I", len(frame)) + frame)

    def send_raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, kind: Any) -> Any:
        (length,) = struct.unpack("<I", self._read(4))
        return msgspec.msgpack.decode(self._read(length), type=kind)

    def _read(self, num_bytes: int) -> bytes:
        found = b""
        while len(found) < num_bytes:
            more = self.socket.recv(num_bytes - len(found))
            if not more:
                raise ConnectionResetError("closed")
            found += more
        return found

    def receive_page(self) -> None:
        """The next page, within the stream."""
        while not isinstance(self.receive(PageHeader | FetchEnded), PageHeader):
            pass
        self._read(PAGE_BYTES)

    def is_closed(self) -> bool:
        """Whether the other end hangs up."""
        try:
            while self.socket.recv(4096):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True


class RawClient(RawPeer):
    def greet(self, port: int, num_credits: int = 4, **more: Any) -> None:
        self.socket.connect(("127.0.0.1", port))
        challenge = self.receive(PageChallenge)
        assert isinstance(challenge, PageChallenge)
        nonce = secrets.token_bytes(32)
        self.send(
            PageGreeting(
                nonce=nonce,
                proof=proof(SECRET, "decode", (challenge.nonce, nonce)),
                num_credits=num_credits,
                **{"format": FORMAT} | more,
            )
        )


class RawServer(RawPeer):
    def __init__(self) -> None:
        super().__init__()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10.0)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._listener.close()

    def accept(self) -> None:
        self.socket.close()
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(10.0)

    def let_in(self, region: NixlRegion | None = None) -> None:
        self.accept()
        nonce = secrets.token_bytes(32)
        self.send(PageChallenge(nonce))
        greeting = self.receive(PageGreeting)
        assert isinstance(greeting, PageGreeting)
        self.send(PageWelcome(proof(SECRET, "prefill", (nonce, greeting.nonce)), region))


def transfer(fetch_id: int = 0, num_pages: int = 20) -> FetchPages:
    request = TokenRequest(prompt_ids=(1, 2, 3))
    return FetchPages(
        fetch_id=fetch_id, request=request, first=0, num_pages=num_pages, num_parts=num_pages
    )

"""Faults a caller of chat with images can cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import httpx
import psutil
import pytest
import pytest_asyncio
from fastapi import FastAPI

from support.http import FakeEngine, in_process, refused
from support.images import hostile, image, saved
from support.text_models import SPECIALS
from support.vision_folders import EXTRA, data_url, shown, write_vision_folder
from triptych.compose import build_app
from triptych.core.media.fetch import MediaFetcher, is_public, resolve
from triptych.core.options.config import Config, ServerOptions
from triptych.modalities.vlm.api.prompt_encoder import RUN

CHAT = "/v1/chat/completions"
PNG = saved(image())
HOSTILE = hostile()
BYTE_IDS = set(range(len(SPECIALS), len(SPECIALS) + 256))
HOST, SLOW_HOST = "127.0.0.1", "127.0.0.2"

# One app for all: its decode child takes a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Net:
    """An inner server that counts who comes, and a slow one that may be asked."""

    def __init__(self) -> None:
        self.num_hits = 0
        self.ports: list[int] = []
        self._servers: list[asyncio.Server] = []
        self._is_over = asyncio.Event()

    async def open(self) -> None:
        self._servers = [
            await asyncio.start_server(self._count, HOST, 0),
            await asyncio.start_server(self._drip, SLOW_HOST, 0),
        ]
        self.ports = [server.sockets[0].getsockname()[1] for server in self._servers]

    async def close(self) -> None:
        self._is_over.set()
        for server in self._servers:
            server.close()
            await server.wait_closed()

    def fetcher(self) -> MediaFetcher:
        return MediaFetcher(
            domains=("*",),
            max_bytes=10**6,
            timeout_s=0.3,
            resolver=self._resolve,
            allows=lambda address: str(address) == SLOW_HOST or is_public(address),
            ports={*self.ports, 80, 443},
        )

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        if host == "nowhere.example":
            await self._is_over.wait()
        known = {"slow.example": [SLOW_HOST], "inside.example": [HOST]}
        return known.get(host) or await resolve(host, port)

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_hits += 1
        writer.close()

    async def _drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
        while not self._is_over.is_set() and not reader.at_eof():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def net() -> AsyncIterator[Net]:
    net = Net()
    await net.open()
    yield net
    await net.close()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(
    tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine, net: Net
) -> AsyncIterator[FastAPI]:
    model = write_vision_folder(tmp_path_factory.mktemp("eyes"))
    config = Config(server=ServerOptions(num_decode_children=1))
    before = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MediaFetcher, "from_options", lambda _: net.fetcher())
        built = build_app(config, [model], engine)
    yield built
    for child in set(psutil.Process().children()) - before:  # they live as long as their server
        child.kill()
        child.wait()


@pytest_asyncio.fixture(loop_scope="module")
async def client(app: FastAPI, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Whatever is done with it, an honest image is answered afterwards."""
    async with in_process(app) as client:
        yield client
        assert (await client.post(CHAT, json=shown(data_url(PNG)))).status_code == 200
        assert not engine.running


async def refusal(client: httpx.AsyncClient, url: str, status: int) -> str:
    """What an image is refused with; it leaks nothing, and the engine never gets it."""
    async with asyncio.timeout(60):
        reply = await client.post(CHAT, json=shown(url))
    error = refused(reply, status)
    assert error["param"] in ("messages", "url")
    return str(error["message"])


@pytest.mark.parametrize("spelled", [*EXTRA, *SPECIALS, RUN])
async def test_special_tokens_in_text_are_text(
    client: httpx.AsyncClient, engine: FakeEngine, spelled: str
) -> None:
    for text in ("xy", f"x{spelled}y"):
        body = shown(data_url(PNG), text=text)
        assert (await client.post(CHAT, json=body)).status_code == 200
    honest, spelling = list(engine.submitted.values())[-2:]
    assert spelling.contents == honest.contents
    start = honest.contents[0].span.end + len("x")
    added = spelling.prompt_ids[start : start + len(spelled.encode())]
    assert set(added) <= BYTE_IDS
    assert spelling.prompt_ids == (*honest.prompt_ids[:start], *added, *honest.prompt_ids[start:])


@pytest.mark.parametrize("name", HOSTILE)
async def test_to_17_hostile_images(client: httpx.AsyncClient, name: str) -> None:
    data, status = HOSTILE[name]
    claimless = data_url(data).replace("image/png", "application/octet-stream", 1)
    await refusal(client, claimless, status)


URLS = [
    "http://127.0.0.1:{port}/", "http://inside.example:{port}/", "http://127.1:{port}/",
    "http://0x7f000001:{port}/", "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/",
    "http://slow.example\\@inside.example:{port}/", "http://slow.example@inside.example:{port}/",
    "http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/", "http://[fd00:ec2::254]/",
    "file:///etc/passwd", "ftp://inside.example/", "gopher://inside.example:{port}/",
    "//inside.example/", "javascript:alert(1)", "", "data:",
    "data:image/png;base64,a!!b", "data:image/png;base64,",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
async def test_no_packet_goes_inside(client: httpx.AsyncClient, net: Net, url: str) -> None:
    await refusal(client, url.format(port=net.ports[0]), 400)
    assert net.num_hits == 0


@pytest.mark.parametrize("host", ["slow.example", "nowhere.example"])
async def test_a_host_that_is_slow_is_given_up(
    client: httpx.AsyncClient, net: Net, host: str
) -> None:
    message = await refusal(client, f"http://{host}:{net.ports[1]}/a.png", 400)
    assert message == f"{host} did not answer within 0.3 s."

"""Files sent while they are made: how they begin, end and fail."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from support.http import FakeEngine, in_process, live
from triptych.core.errors import InvalidRequest, NonFinite
from triptych.core.http.app import create_app
from triptych.core.http.byte_stream import ByteStream
from triptych.core.options.config import Config


@dataclass
class File:
    """`num_chunks` chunks, and then perhaps an error."""

    num_chunks: int = 3
    error: Exception | None = None
    num_made: int = 0
    is_closed: bool = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self.num_chunks):
                self.num_made += 1
                yield bytes([number]) * 10
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True

    async def describe(self) -> Mapping[str, str]:
        return {"x-made": str(self.num_made)}

    def app(self) -> FastAPI:
        router = APIRouter()

        @router.post("/file")
        async def file(body: dict[str, str]) -> ByteStream:
            return ByteStream(self.chunks(), media_type="audio/wav", describe=self.describe)

        return create_app(Config(), FakeEngine(), [router])


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
async def test_a_file_comes_whole_with_what_is_known_when_it_begins(num_chunks: int) -> None:
    file = File(num_chunks)
    async with in_process(file.app()) as client:
        reply = await client.post("/file", json={})
    assert reply.content == b"".join(bytes([number]) * 10 for number in range(num_chunks))
    assert reply.headers["content-type"] == "audio/wav"
    assert reply.headers["x-made"] == str(min(num_chunks, 1))
    assert "content-length" not in reply.headers
    assert file.is_closed


async def test_an_error_before_the_first_chunk_is_an_answer() -> None:
    file = File(0, InvalidRequest("No."))
    async with in_process(file.app()) as client:
        reply = await client.post("/file", json={})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "No.")


@pytest.mark.parametrize("error", [NonFinite("NaN."), RuntimeError("secret")])
async def test_without_a_connection_to_cut_an_error_is_raised(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    file = File(2, error)
    async with in_process(file.app()) as client:
        with pytest.raises(RuntimeError):
            await client.post("/file", json={})
    assert file.is_closed
    assert "stream" in caplog.text


def test_an_error_later_cuts_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    file = File(2, RuntimeError("secret"))
    with live(file.app()) as server, httpx.Client(verify=False) as client:
        with pytest.raises(httpx.TransportError):
            client.post(f"{server.url}/file", json={})
        assert "stream failed" in caplog.text
        assert "without completing" not in caplog.text
        assert file.is_closed
        file.error = None
        assert client.post(f"{server.url}/file", json={}).status_code == 200

"""The engine on a thread, behind the client's interface; streams and their bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from support.engine_seams import FakeFrames, FakeLoader, FrameRequest, FrameRunner
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.engine_api.streams import StreamTable
from triptych.core.errors import (
    EngineDown,
    ErrorInfo,
    NotFound,
    SlowReader,
    TriptychError,
    WeightsError,
)
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

WAIT_S = 30.0


@asynccontextmanager
async def local(
    *loaders: FakeLoader, config: Config | None = None
) -> AsyncIterator[tuple[LocalClient, EngineCore]]:
    engine = EngineCore(loaders, config=config or Config(), ledger=Ledger(0))
    client = LocalClient(engine)
    try:
        yield client, engine
    finally:
        await asyncio.wait_for(client.close(), WAIT_S)


async def until(condition: Callable[[], object]) -> None:
    """Wait, within bounds, for what another thread does."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the other side has no event to wait for)
            await asyncio.sleep(0.001)


async def read(stream: AsyncIterator[Output]) -> list[object]:
    return [output.payload async for output in stream]


def frames(name: str = "voice", **runner: object) -> FakeLoader:
    return FakeLoader(name, lambda: (FakeFrames(name), FrameRunner(**runner)))  # type: ignore[arg-type]


async def test_outputs_arrive_in_order_and_the_stream_ends() -> None:
    async with local(frames()) as (client, _):
        streams = [
            client.submit("voice", FrameRequest(num_frames=50), job_id=f"job{n}") for n in range(8)
        ]
        read_all = asyncio.gather(*map(read, streams))
        for payloads in await asyncio.wait_for(read_all, WAIT_S):
            assert payloads == list(range(1, 51))
        status = client.status()
        assert (status.is_ready, status.is_alive, status.is_draining) == (True, True, False)


async def test_errors_arrive_as_exceptions() -> None:
    async with local(frames(errors={2: ValueError("broken")})) as (client, _):
        with pytest.raises(NotFound):
            await anext(client.submit("nothing", None, job_id="a"))
        stream = client.submit("voice", FrameRequest(num_frames=9), job_id="b")
        with pytest.raises(TriptychError, match="internal error"):
            await asyncio.wait_for(read(stream), WAIT_S)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_closing_a_stream_cancels_its_job() -> None:
    scheduler = FakeFrames("voice")
    loader = FakeLoader("voice", lambda: (scheduler, FrameRunner()))
    async with local(loader) as (client, _):
        async with aclosing(
            client.submit("voice", FrameRequest(num_frames=10**9), job_id="job")
        ) as stream:
            assert (await asyncio.wait_for(anext(stream), WAIT_S)).payload == 1
        await until(lambda: not scheduler.stats().num_running)


async def test_a_slow_reader_is_paused_and_resumed() -> None:
    scheduler = FakeFrames("voice")
    loader = FakeLoader("voice", lambda: (scheduler, FrameRunner()))
    async with local(loader) as (client, _):
        slow = client.submit("voice", FrameRequest(num_frames=2000), job_id="slow")
        await until(lambda: "slow" in scheduler.paused)
        payloads = await asyncio.wait_for(read(slow), WAIT_S)
        assert payloads == list(range(1, 2001)), "nothing is lost by waiting"
        assert "slow" not in scheduler.paused


async def test_fault_29_a_reader_that_stops_is_ended_and_others_are_not() -> None:
    scheduler = FakeFrames("voice")
    loader = FakeLoader("voice", lambda: (scheduler, FrameRunner()))
    config = replace(Config(), server=ServerOptions(stream_timeout_s=0.05))
    async with local(loader, config=config) as (client, _):
        slow = client.submit("voice", FrameRequest(num_frames=10**9), job_id="slow")
        await until(lambda: not (scheduler.stats().num_running or not scheduler.num_pauses))
        with pytest.raises(SlowReader):
            await anext(slow)
        fast = client.submit("voice", FrameRequest(num_frames=100), job_id="fast")
        assert len(await asyncio.wait_for(read(fast), WAIT_S)) == 100


async def test_the_engines_death_reaches_every_open_stream() -> None:
    class Broken(FakeFrames):
        def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
            raise AssertionError("my books do not balance")

    broken = FakeLoader("broken", lambda: (Broken("broken"), FrameRunner()))
    async with local(frames(), broken) as (client, _):
        await asyncio.wait_for(client.load("voice"), WAIT_S)
        streams = [
            client.submit("voice", FrameRequest(num_frames=10**9, period_s=3600), job_id=f"job{n}")
            for n in range(3)
        ]
        streams.append(client.submit("broken", FrameRequest(num_frames=1), job_id="last"))
        for stream in streams:
            with pytest.raises(EngineDown):
                await asyncio.wait_for(read(stream), WAIT_S)
        with pytest.raises(EngineDown):
            await anext(client.submit("voice", FrameRequest(num_frames=1), job_id="after"))
        with pytest.raises(EngineDown):
            await client.load("voice")
        await until(lambda: not client.status().is_alive)
        assert client.status().reason


async def test_load_waits_and_raises_what_loading_raised() -> None:
    config = Config(models=ModelOptions(load="first-use"))
    bad = frames("bad")
    bad.errors = [WeightsError("model.safetensors is truncated")]
    async with local(frames(), bad, config=config) as (client, _):
        await asyncio.wait_for(client.load("voice"), WAIT_S)
        with pytest.raises(WeightsError, match="truncated"):
            await asyncio.wait_for(client.load("bad"), WAIT_S)
        with pytest.raises(NotFound):
            await asyncio.wait_for(client.load("nothing"), WAIT_S)


async def test_a_start_that_fails_is_what_load_raises() -> None:
    bad = frames("bad")
    bad.gate = threading.Event()
    bad.errors = [WeightsError("model.safetensors is truncated")]
    async with local(bad) as (client, _):
        loading = asyncio.ensure_future(client.load("bad"))
        await asyncio.sleep(0)
        bad.gate.set()
        with pytest.raises(WeightsError, match="truncated"):
            await asyncio.wait_for(loading, WAIT_S)
        with pytest.raises(WeightsError, match="truncated"):
            await asyncio.wait_for(client.load("bad"), WAIT_S)


async def test_close_ends_open_streams() -> None:
    async with local(frames()) as (client, _):
        stream = client.submit("voice", FrameRequest(num_frames=10**9), job_id="job")
        await asyncio.wait_for(anext(stream), WAIT_S)
    with pytest.raises(EngineDown):
        await read(stream)


class Table:
    """A stream table and what it asked for."""

    def __init__(self, **bounds: float) -> None:
        self.cancelled: list[str] = []
        self.paused: list[tuple[str, bool]] = []
        self.table = StreamTable(
            on_cancel=self.cancelled.extend,
            on_pause=lambda job_ids, is_paused: self.paused.extend(
                (job_id, is_paused) for job_id in job_ids
            ),
            stream_timeout_s=bounds.get("stream_timeout_s", 1000.0),
            high_water=4,
            low_water=1,
        )


def output(payload: object, *, is_final: bool = False) -> Output:
    return Output(job_id="job", payload=payload, is_final=is_final)


async def test_a_buffer_pauses_above_high_water_and_resumes_below_low_water() -> None:
    world = Table()
    stream = world.table.open("job")
    for n in range(6):
        world.table.deliver(output(n))
    assert world.paused == [("job", True)]
    for n in range(4):
        assert (await anext(stream)).payload == n
    assert world.paused == [("job", True)]
    await anext(stream)
    assert world.paused == [("job", True), ("job", False)]
    world.table.deliver(output("end", is_final=True))
    assert [o.payload async for o in stream] == [5, "end"]


async def test_what_is_buffered_is_read_before_the_error() -> None:
    world = Table()
    stream = world.table.open("job")
    world.table.deliver(output(1))
    world.table.fail_all(EngineDown("gone"))
    assert (await anext(stream)).payload == 1
    with pytest.raises(EngineDown):
        await anext(stream)
    await stream.aclose()
    assert world.cancelled == [], "there is nothing left to cancel"
    assert len(world.table) == 0


async def test_each_reader_gets_an_error_of_its_own() -> None:
    world, gone = Table(), EngineDown("gone", retry_after_s=3.0)
    streams = [world.table.open(name) for name in "ab"]
    world.table.fail_all(gone)
    errors = []
    for stream in streams:
        with pytest.raises(EngineDown) as caught:
            await anext(stream)
        errors.append(caught.value)
    assert len({id(error) for error in (*errors, gone)}) == 3
    assert all(error.message == "gone" and error.retry_after_s == 3.0 for error in errors)


async def test_a_reader_that_leaves_cancels_once() -> None:
    world = Table()
    stream = world.table.open("job")
    waiting = asyncio.ensure_future(anext(stream, "over"))
    await asyncio.sleep(0)
    await stream.aclose()
    await stream.aclose()
    assert await waiting == "over"
    assert world.cancelled == ["job"]
    world.table.deliver(output("too late"))
    assert "job" not in world.table


async def test_a_final_error_is_raised_once() -> None:
    world = Table()
    stream = world.table.open("job")
    error = ErrorInfo(code="non_finite", message="NaN", retry_after_s=None)
    world.table.deliver(Output(job_id="job", is_final=True, error=error))
    with pytest.raises(Exception, match="NaN"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_that_reads_slowly_but_reads_is_not_ended() -> None:
    world = Table(stream_timeout_s=0.05)
    stream = world.table.open("job")
    for n in range(5):
        world.table.deliver(output(n))
    assert world.paused == [("job", True)]
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    while loop.time() < begin_s + 0.2:  # four times the limit, reading all the while
        assert (await anext(stream)).payload is not None
        world.table.deliver(output("more"))
        await asyncio.sleep(0.005)
    assert world.cancelled == []
    await until(lambda: world.cancelled)
    with pytest.raises(SlowReader):
        await anext(stream)

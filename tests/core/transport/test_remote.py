"""The client of an engine process, against a peer in this process that plays the engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.model_changes import LoadModel
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.streams import HIGH_WATER
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import (
    Draining,
    EngineDown,
    ErrorInfo,
    OutOfMemory,
    PayloadTooLarge,
    SlowReader,
    WeightsError,
)
from triptych.core.transport import remote
from triptych.core.transport.endpoint import connect_dealer, private_folder
from triptych.core.transport.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Change,
    Changed,
    EngineGone,
    Goodbye,
    Hello,
    MessageCodec,
    Outputs,
    SetPaused,
)
from triptych.core.transport.remote import SUPERVISOR, RemoteClient, engine_identity

CODEC = MessageCodec(request=TokenRequest, payload=TokenDelta)
REQUEST = TokenRequest(prompt_ids=(1, 2), sampling=SamplingParams())


class Peer:
    """Plays an engine (or the supervisor) on the other end of the socket."""

    def __init__(self, folder, identity):
        self._owned = connect_dealer(folder, identity)
        self.socket = zmq.asyncio.Socket(self._owned)

    def close(self):
        self.socket.close()
        self._owned.close()

    async def send(self, message):
        await self.socket.send(CODEC.encode(message))

    async def send_bytes(self, data):
        await self.socket.send(data)

    async def receive(self, kind):
        async with asyncio.timeout(5):
            message = CODEC.to_engine(await self.socket.recv())
        assert isinstance(message, kind)
        return message

    async def nothing_arrives(self):
        return not await self.socket.poll(50)

    async def beat(self, state="ready", stall_budget_s=30.0, phase="idle", **counters):
        models = (ModelStatus(model="m", state=state),)
        await self.send(
            Heartbeat(
                turn=1,
                phase=phase,
                stall_budget_s=stall_budget_s,
                num_jobs=0,
                models=models,
                gauges={},
                counters=counters,
                histograms={},
            )
        )

    async def output(self, job_id, *token_ids, is_final=False, error=None):
        payload = TokenDelta(token_ids=token_ids)
        output = Output(job_id=job_id, payload=payload, is_final=is_final, error=error)
        await self.send(Outputs((output,)))

    async def finish(self, job_id, *token_ids):
        await self.output(job_id, *token_ids, is_final=True)


class World:
    """A client and the means to make peers for it."""

    def __init__(self, folder, client):
        self.folder = folder
        self.client = client
        self.peers = []

    def peer(self, identity):
        peer = Peer(self.folder, identity)
        self.peers.append(peer)
        return peer

    async def engine(self, epoch_ns=None, **beat):
        """An engine that has said its first word."""
        engine = self.peer(engine_identity(epoch_ns or time.monotonic_ns()))
        await engine.beat(**beat)
        await engine.receive(Hello)
        return engine

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition(self.client.status()):  # noqa: ASYNC110 (it sends no event)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def open_world(*, stream_timeout_s=30.0):
    with private_folder("", role="api") as folder:
        world = World(folder, RemoteClient(folder, CODEC, stream_timeout_s=stream_timeout_s))
        try:
            yield world
        finally:
            await world.client.close()
            for peer in world.peers:
                peer.close()


@pytest.fixture
async def world():
    async with open_world() as world:
        yield world


async def collect(stream):
    return [token for output in [o async for o in stream] for token in output.payload.token_ids]


async def test_a_job_streams_to_its_end(world):
    engine = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a", deadline_s=5.0)
    submit = await engine.receive(Job)
    assert (submit.job_id, submit.model, submit.limit_s) == ("a", "m", 5.0)
    assert submit.request == REQUEST
    await engine.output("a", 1, 2)
    await engine.finish("a", 3)
    assert await collect(stream) == [1, 2, 3]


async def test_jobs_do_not_mix(world):
    engine = await world.engine()
    streams = {job_id: world.client.submit("m", REQUEST, job_id=job_id) for job_id in "ab"}
    for token in range(100):
        await engine.output("a", token)
        await engine.output("b", token + 1000)
    await engine.finish("a")
    await engine.finish("b")
    tokens = await asyncio.gather(*map(collect, streams.values()))
    assert tokens == [list(range(100)), list(range(1000, 1100))]


async def test_a_jobs_error_arrives_typed(world):
    engine = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    error = ErrorInfo(code="out_of_memory", message="Oh.")
    await engine.output("a", is_final=True, error=error)
    with pytest.raises(OutOfMemory, match="Oh"):
        await collect(stream)


async def test_leaving_a_stream_cancels_its_job(world):
    engine = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    await engine.receive(Job)
    await engine.output("a", 1)
    async with aclosing(stream):
        await anext(stream)
    assert (await engine.receive(Cancel)).job_ids == ("a",)


async def test_a_reader_that_falls_behind_pauses_its_job_and_resumes_it(world):
    engine = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    await engine.receive(Job)
    for token in range(HIGH_WATER):
        await engine.output("a", token)
    assert await engine.receive(SetPaused) == SetPaused(("a",), True)
    assert await engine.nothing_arrives()
    reading = asyncio.create_task(collect(stream))
    assert await engine.receive(SetPaused) == SetPaused(("a",), False)
    await engine.finish("a")
    assert await reading == list(range(HIGH_WATER))


async def test_a_reader_that_stops_for_good_loses_its_job():
    async with open_world(stream_timeout_s=0.1) as world:
        engine = await world.engine()
        stream = world.client.submit("m", REQUEST, job_id="a")
        await engine.receive(Job)
        for token in range(HIGH_WATER):
            await engine.output("a", token)
        await engine.receive(SetPaused)
        assert (await engine.receive(Cancel)).job_ids == ("a",)
        with pytest.raises(SlowReader):
            await collect(stream)


async def test_jobs_wait_for_the_first_engine(world):
    status = world.client.status()
    assert (status.is_ready, status.is_alive) == (False, True)
    assert "starting" in status.reason
    streams = [world.client.submit("m", REQUEST, job_id=job_id) for job_id in "abc"]
    await streams[1].aclose()
    engine = await world.engine()
    assert [(await engine.receive(Job)).job_id for _ in "ac"] == ["a", "c"]
    assert await engine.nothing_arrives()
    await engine.finish("c", 7)
    assert await collect(streams[2]) == [7]
    await engine.send(Goodbye())
    with pytest.raises(EngineDown):
        await collect(streams[0])
    with pytest.raises(EngineDown, match="shut down"):  # the second may take its time
        await collect(world.client.submit("m", REQUEST, job_id="d"))


async def test_jobs_that_wait_for_the_first_engine_end_with_it(world):
    stream = world.client.submit("m", REQUEST, job_id="a")
    supervisor = world.peer(SUPERVISOR)
    await supervisor.send(EngineGone(reason="was killed", at_ns=time.monotonic_ns()))
    with pytest.raises(EngineDown, match="was killed"):
        await collect(stream)
    await world.engine()
    assert not world.client._waiting


async def test_jobs_wait_for_a_while(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_ENGINE_WAIT_S", 0.1)
    async with open_world() as world:
        stream = world.client.submit("m", REQUEST, job_id="a")
        with pytest.raises(EngineDown, match="starting"):
            await collect(stream)
        with pytest.raises(EngineDown, match="starting"):
            await collect(world.client.submit("m", REQUEST, job_id="b"))


async def test_what_waits_is_bounded(world):
    tenant = "x" * (MAX_MESSAGE_BYTES // 2 + 1)
    large = TokenRequest(prompt_ids=(1,), sampling=SamplingParams(), tenant=tenant)
    first = world.client.submit("m", large, job_id="a")
    with pytest.raises(EngineDown):
        await collect(world.client.submit("m", large, job_id="b"))
    engine = await world.engine()
    assert (await engine.receive(Job)).job_id == "a"
    await first.aclose()


async def test_a_request_that_fits_no_message_is_refused_alone(world):
    engine = await world.engine()
    huge = TokenRequest(prompt_ids=(1,), sampling=SamplingParams(), tenant="x" * MAX_MESSAGE_BYTES)
    stream = world.client.submit("m", huge, job_id="a")
    with pytest.raises(PayloadTooLarge, match="the limit is 64 MiB"):
        await anext(stream)
    following = world.client.submit("m", REQUEST, job_id="b")
    assert (await engine.receive(Job)).job_id == "b"
    await engine.finish("b", 7)
    assert [output.job_id async for output in following] == ["b"]


async def test_readiness_follows_the_models(world):
    engine = await world.engine(state="loading")
    await world.until(lambda status: status.models)
    assert not world.client.status().is_ready
    await engine.beat()
    await world.until(lambda status: status.is_ready)


async def test_a_dead_engine_fails_its_jobs_and_the_next_one_makes_ready(world):
    await world.engine()
    crashes: list[str] = []
    world.client.on_crash = crashes.append
    stream = world.client.submit("m", REQUEST, job_id="a")
    supervisor = world.peer(SUPERVISOR)
    await supervisor.send(
        EngineGone(reason="was killed", at_ns=time.monotonic_ns(), restart_in_s=1.0)
    )
    with pytest.raises(EngineDown, match="was killed") as caught:
        async with asyncio.timeout(1):
            await collect(stream)
    assert caught.value.retry_after_s == pytest.approx(1.0 + remote.USUAL_START_S, abs=1.0)
    assert crashes == ["the engine was killed"]
    assert not world.client.status().is_ready
    await world.engine()
    await world.until(lambda status: status.is_ready)
    assert world.client.status().num_restarts == 1


async def test_counts_go_on_where_an_engine_was_replaced(world):
    engine = await world.engine()
    await engine.beat(steps=2.0)
    await world.until(lambda status: status.last_beat.counters)
    supervisor = world.peer(SUPERVISOR)
    await supervisor.send(EngineGone(reason="was killed", at_ns=time.monotonic_ns()))
    await world.until(lambda status: status.last_beat is None)
    engine = await world.engine()
    await engine.beat(steps=1.0)
    await world.until(lambda status: status.last_beat.counters["steps"] == 3)


async def test_a_retry_is_asked_for_when_the_engine_will_be_ready(monkeypatch):
    """By how long its last start took; by a guess where none was seen, or it takes longer now."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    async def retry_after_s(world):
        with pytest.raises(EngineDown) as caught:
            await collect(world.client.submit("m", REQUEST, job_id=f"{next(numbers)}"))
        return caught.value.retry_after_s

    numbers = itertools.count()
    async with open_world() as world:
        supervisor = world.peer(SUPERVISOR)

        async def lose():
            gone = EngineGone(reason="was killed", at_ns=time.monotonic_ns(), restart_in_s=2.0)
            await supervisor.send(gone)
            await world.until(lambda status: status.reason == "the engine was killed")

        engine = await world.engine(state="loading")
        await world.until(lambda status: status.models)
        clock.now_s += 40.0
        await engine.beat()
        await world.until(lambda status: status.is_ready)
        clock.now_s += 500.0
        stream = world.client.submit("m", REQUEST, job_id="ended by the engine")
        lost = ErrorInfo(code=EngineDown.code, message="A device was lost.", retry_after_s=5.0)
        await engine.output("ended by the engine", is_final=True, error=lost)
        with pytest.raises(EngineDown) as caught:
            await collect(stream)
        assert caught.value.retry_after_s == 40.0
        await lose()
        assert await retry_after_s(world) == 42.0
        clock.now_s += 12.0
        assert await retry_after_s(world) == 30.0
        clock.now_s += 60.0
        assert await retry_after_s(world) == remote.USUAL_START_S
        await world.engine()  # which had started before its first word came
        await world.until(lambda status: status.is_ready)
        await lose()
        assert await retry_after_s(world) == 42.0


async def test_messages_of_a_dead_engine_are_ignored(world):
    old = await world.engine()
    supervisor = world.peer(SUPERVISOR)
    await supervisor.send(EngineGone(reason="died", at_ns=time.monotonic_ns()))
    await world.until(lambda status: not status.is_ready)
    await old.beat()
    assert not await old.socket.poll(100)  # no greeting
    assert not world.client.status().is_ready


async def test_a_late_word_about_a_dead_engine_does_not_harm_its_successor(world):
    first_ns = time.monotonic_ns()
    await world.engine(first_ns)
    died_ns = time.monotonic_ns()
    second = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    await world.peer(SUPERVISOR).send(EngineGone(reason="died", at_ns=died_ns))
    await asyncio.sleep(0.05)
    await second.finish("a", 5)
    assert await collect(stream) == [5]


async def test_a_later_engine_replaces_an_earlier_one(world):
    old = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    new = await world.engine()
    with pytest.raises(EngineDown):
        await collect(stream)
    again = world.client.submit("m", REQUEST, job_id="a")
    await old.finish("a", 666)
    await new.receive(Job)
    await new.finish("a", 1)
    assert await collect(again) == [1]


async def test_silence_beyond_the_budget_is_not_alive_and_ends_streams(world):
    engine = await world.engine(stall_budget_s=0.3)
    await world.until(lambda status: status.is_ready)
    stream = world.client.submit("m", REQUEST, job_id="a")
    await engine.receive(Job)
    with pytest.raises(EngineDown, match="no progress"):
        await collect(stream)
    status = world.client.status()
    assert (status.is_ready, status.is_alive) == (False, False)
    with pytest.raises(EngineDown):
        await collect(world.client.submit("m", REQUEST, job_id="b"))
    await engine.receive(Hello)  # the jobs of before are orphans
    await engine.beat()
    await world.until(lambda status: status.is_ready)


async def test_an_engine_that_stood_still_with_this_process_is_alive(world):
    engine = await world.engine(stall_budget_s=0.5)
    stream = world.client.submit("m", REQUEST, job_id="a")
    await engine.receive(Job)
    time.sleep(1.5)  # noqa: ASYNC251 - as where the whole machine was stopped
    await asyncio.sleep(0.2)
    assert world.client.status().is_alive
    await engine.beat()
    await engine.finish("a", 1)
    assert await collect(stream) == [1]


async def test_a_goodbye_ends_the_engine(world):
    engine = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    await engine.send(Goodbye())
    with pytest.raises(EngineDown, match="shut down"):
        await collect(stream)


async def test_malformed_and_foreign_messages_are_ignored(world):
    engine = await world.engine()
    stream = world.client.submit("m", REQUEST, job_id="a")
    await engine.send_bytes(b"\xc1\xff")
    for name in (b"engine-", b"engine-x", b"engine-" + b"9" * 30, b"stranger"):
        await world.peer(name).finish("a", 9)
    await world.peer(b"stranger").send(EngineGone(reason="lies", at_ns=2**62))
    await asyncio.sleep(0.05)
    await engine.finish("a", 1)
    assert await collect(stream) == [1]


async def test_load_waits_for_the_answer(world):
    engine = await world.engine(state="unloaded")
    loading = asyncio.create_task(world.client.load("m"))
    asked = await engine.receive(Change)
    assert asked.change == LoadModel("m")
    await engine.beat(state="loading")
    await asyncio.sleep(0.02)
    assert not loading.done()
    kept: list[object] = []
    world.client.on_kept = kept.append
    await engine.send(Changed(call=asked.call))
    await loading
    assert kept == [()]  # nothing to repeat in a later engine


async def test_load_raises_what_loading_raised(world):
    engine = await world.engine(state="unloaded")
    loading = asyncio.create_task(world.client.load("m"))
    asked = await engine.receive(Change)
    error = ErrorInfo(code="weights_error", message="Bad file.")
    await engine.send(Changed(call=asked.call, error=error))
    with pytest.raises(WeightsError, match="Bad file"):
        await loading


async def test_load_ends_with_the_engine(world):
    engine = await world.engine(state="unloaded")
    loading = asyncio.create_task(world.client.load("m"))
    await engine.receive(Change)
    await engine.send(Goodbye())
    with pytest.raises(EngineDown):
        await loading
    with pytest.raises(EngineDown):
        await world.client.load("m")


async def test_a_model_loaded_on_first_use_does_not_make_the_server_unready(world):
    engine = await world.engine(state="unloaded")
    await engine.beat(state="loading")
    await world.until(lambda status: status.models[0].state == "loading")
    assert world.client.status().is_ready


async def test_a_draining_engine_takes_no_jobs(world):
    engine = await world.engine()
    await engine.beat(phase="drain")
    await world.until(lambda status: status.is_draining)
    assert not world.client.status().is_ready
    with pytest.raises(Draining):
        await collect(world.client.submit("m", REQUEST, job_id="a"))


async def test_closing_ends_every_stream():
    async with open_world() as world:
        await world.engine()
        stream = world.client.submit("m", REQUEST, job_id="a")
        await world.client.close()
        with pytest.raises(Draining):
            await collect(stream)

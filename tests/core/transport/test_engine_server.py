"""The engine's end of the socket, with a stand-in for the engine and the real client."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, asynccontextmanager, closing

import pytest

from support.engine_seams import eventually
from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.reports import (
    Heartbeat,
    ModelStatus,
    RunningStep,
    StepRecord,
    StepReport,
)
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import EngineDown, OutOfMemory, WeightsError, to_info
from triptych.core.transport.endpoint import bind_router, private_folder
from triptych.core.transport.engine_server import EngineServer
from triptych.core.transport.messages import Goodbye, Hello, MessageCodec
from triptych.core.transport.remote import RemoteClient

CODEC = MessageCodec(request=TokenRequest, payload=TokenDelta)
REQUEST = TokenRequest(prompt_ids=(1, 2), sampling=SamplingParams())


class EchoEngine:
    """Remembers what it was asked; the test plays its loop by calling `turn`."""

    def __init__(self):
        self.on_turn = lambda: None
        self.on_steps = lambda report: None
        self.watched = []
        self.clock = time.monotonic
        self.calls = queue.SimpleQueue()
        self.jobs = {}

    def submit(self, job):
        self.jobs[job.job_id] = job
        self.calls.put(("submit", job.job_id))

    def cancel(self, job_ids):
        self.calls.put(("cancel", tuple(job_ids)))

    def set_paused(self, job_ids, is_paused):
        self.calls.put(("set_paused", tuple(job_ids), is_paused))

    def change(self, change, done):
        self.calls.put(("load", change.model))
        done(WeightsError("Bad file.") if change.model == "bad" else None)

    def watch(self, is_on):
        self.watched.append(is_on)

    def turn(self, *outputs):
        for output in outputs:
            self.jobs[output.job_id].sink(output)
        self.on_turn()

    async def called(self):
        return await asyncio.to_thread(self.calls.get, timeout=5)


def delta(job_id, *token_ids, **fields):
    return Output(job_id=job_id, payload=TokenDelta(token_ids=token_ids), **fields)


def beat(name="m"):
    models = (ModelStatus(model=name, state="ready"),)
    return Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=30.0,
        num_jobs=0,
        models=models,
        gauges={},
        counters={},
        histograms={},
    )


async def until_ready(client, server):
    async with asyncio.timeout(5):
        while not client.status().is_ready:
            server.send_beat(beat())
            await asyncio.sleep(0.01)


@asynccontextmanager
async def open_pair():
    """A connected client, engine and server; the client has greeted."""
    with private_folder("", role="api") as folder:
        client = RemoteClient(folder, CODEC, stream_timeout_s=30.0)
        engine = EchoEngine()
        server = EngineServer(engine, folder, CODEC)
        await until_ready(client, server)
        assert await engine.called() == ("cancel", ())
        try:
            yield client, engine, server, folder
        finally:
            if server._thread.is_alive():
                await asyncio.to_thread(server.close, is_drained=True)
            await client.close()


async def collect(stream):
    return [token for output in [o async for o in stream] for token in output.payload.token_ids]


async def test_a_job_goes_in_and_its_outputs_come_back():
    async with open_pair() as (client, engine, _, _):
        before_s = time.monotonic()
        stream = client.submit("m", REQUEST, job_id="a", deadline_s=100.0)
        assert await engine.called() == ("submit", "a")
        job = engine.jobs["a"]
        assert (job.model, job.request) == ("m", REQUEST)
        assert before_s + 100 <= job.deadline_s <= time.monotonic() + 100
        engine.turn(delta("a", 1), delta("a", 2))
        engine.turn(delta("a", 3, is_final=True))
        assert await collect(stream) == [1, 2, 3]


async def test_what_is_the_engines_own_of_a_job_its_sender_has_no_say_in():
    async with open_pair() as (client, engine, _, _):
        before_s = time.monotonic()
        own = {"state": JobState.FINISHED, "is_paused": True, "timings": {"scheduled_s": 1.0}}
        client._post(Job(job_id="a", model="m", request=REQUEST, arrival_s=-1e9, **own))
        assert await engine.called() == ("submit", "a")
        job = engine.jobs["a"]
        assert (job.state, job.is_paused, job.timings) == (JobState.WAITING, False, {})
        assert before_s <= job.arrival_s <= time.monotonic()


async def test_many_jobs_outputs_of_a_turn_arrive_in_order():
    async with open_pair() as (client, engine, _, _):
        streams = [client.submit("m", REQUEST, job_id=str(n)) for n in range(50)]
        for _ in streams:
            await engine.called()
        for token in range(20):
            engine.turn(*(delta(str(n), token) for n in range(50)))
        engine.turn(*(delta(str(n), is_final=True) for n in range(50)))
        assert await asyncio.gather(*map(collect, streams)) == [list(range(20))] * 50


async def test_cancelling_and_loading_reach_the_engine():
    async with open_pair() as (client, engine, _, _):
        stream = client.submit("m", REQUEST, job_id="a")
        await engine.called()
        await stream.aclose()
        assert await engine.called() == ("cancel", ("a",))
        await client.load("m")
        with pytest.raises(WeightsError, match="Bad file"):
            await client.load("bad")


async def test_an_error_crosses_typed():
    async with open_pair() as (client, engine, _, _):
        stream = client.submit("m", REQUEST, job_id="a")
        await engine.called()
        error = to_info(OutOfMemory("Too big."))
        engine.turn(Output(job_id="a", is_final=True, error=error))
        with pytest.raises(OutOfMemory, match="Too big"):
            await collect(stream)


async def test_a_new_api_process_orphans_the_jobs_of_the_one_before():
    async with open_pair() as (client, engine, server, folder):
        for job_id in "ab":
            client.submit("m", REQUEST, job_id=job_id)
            await engine.called()
        engine.turn(delta("b", is_final=True))
        await client.close()
        successor = RemoteClient(folder, CODEC, stream_timeout_s=30.0)
        await until_ready(successor, server)
        assert await engine.called() == ("cancel", ("a",))
        engine.turn(delta("a", 1))  # goes nowhere
        stream = successor.submit("m", REQUEST, job_id="c")
        await engine.called()
        engine.turn(delta("c", 7, is_final=True))
        assert await collect(stream) == [7]
        await successor.close()


async def test_the_engine_may_be_there_before_the_api_process():
    with private_folder("", role="api") as folder:
        server = EngineServer(EchoEngine(), folder, CODEC)
        server.send_beat(beat())  # lost: there is no client
        await asyncio.sleep(0.05)
        client = RemoteClient(folder, CODEC, stream_timeout_s=30.0)
        await until_ready(client, server)
        await asyncio.to_thread(server.close, is_drained=True)
        await client.close()


STEP = StepRecord(
    model="m", kind="decode", num_rows=2, start_s=5.0, length_s=0.01, busy_s=0.01, num_steps=1
)


async def test_steps_are_reported_to_watchers_alone():
    async with open_pair() as (client, engine, _, _):
        assert engine.watched == [False]  # the greeting
        reports, others = asyncio.Queue(), asyncio.Queue()
        leave = client.watch(reports.put_nowait)
        leave_too = client.watch(others.put_nowait)
        report = StepReport(
            steps=(STEP,),
            running=RunningStep(model="m", kind="prefill", start_s=5.01),
            num_dropped=3,
        )
        await asyncio.to_thread(eventually, lambda: engine.watched == [False, True])
        engine.on_steps(report)
        async with asyncio.timeout(5):
            assert await reports.get() == await others.get() == report
        leave()
        leave()  # a second time makes no difference
        assert engine.watched == [False, True]
        leave_too()
        await asyncio.to_thread(eventually, lambda: engine.watched == [False, True, False])
        engine.on_steps(report)
        await client.load("m")  # its answer comes after the report
        assert reports.empty()


async def test_an_engine_that_comes_later_is_watched_too():
    async with open_pair() as (client, engine, server, folder):
        leave = client.watch(lambda report: None)
        await asyncio.to_thread(eventually, lambda: engine.watched == [False, True])
        await asyncio.to_thread(server.close, is_drained=True)
        async with asyncio.timeout(5):
            while client.status().is_ready:  # noqa: ASYNC110 (its goodbye is still on the way)
                await asyncio.sleep(0.001)
        successor = EchoEngine()
        server_too = EngineServer(successor, folder, CODEC)
        await until_ready(client, server_too)
        await asyncio.to_thread(eventually, lambda: successor.watched == [False, True])
        leave()
        await asyncio.to_thread(server_too.close, is_drained=True)


async def test_closing_flushes_messages_and_sends_goodbye():
    async with open_pair() as (client, engine, server, _):
        done = client.submit("m", REQUEST, job_id="a")
        left = client.submit("m", REQUEST, job_id="b")
        await engine.called()
        await engine.called()
        engine.jobs["a"].sink(delta("a", 1, is_final=True))
        await asyncio.to_thread(server.close, is_drained=True)
        assert await collect(done) == [1]
        with pytest.raises(EngineDown, match="shut down"):
            await collect(left)


LAST_WORDS = """
import os, sys
from pathlib import Path
from core.transport.test_engine_server import CODEC, EchoEngine, beat
from triptych.core.transport.engine_server import EngineServer

engine = EchoEngine()
server = EngineServer(engine, Path(sys.argv[1]), CODEC)
while engine.calls.empty():  # until the other end has sent its greeting
    server.send_beat(beat())
for _ in range(200):
    server.send_beat(beat(name="m" * 100_000))
server.close(is_drained=True)
os._exit(0)
"""


def test_the_last_messages_leave_a_process_that_exits_at_once():
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder("", role="api"))
        router = stack.enter_context(closing(bind_router(folder)))
        command = [sys.executable, "-c", LAST_WORDS, folder]
        engine = stack.enter_context(subprocess.Popen(command, cwd="tests"))
        stack.callback(engine.kill)
        assert router.poll(30_000), "no engine"
        identity, _ = router.recv_multipart()
        router.send_multipart((identity, CODEC.encode(Hello())))
        time.sleep(0.5)  # a reader that is slow: nothing is read until the engine closes
        received = []
        while not received or not isinstance(received[-1], Goodbye):
            assert router.poll(10_000), "no goodbye"
            received += map(CODEC.from_engine, router.recv_multipart()[1:])
        assert engine.wait(10) == 0
    beats = [each for each in received if isinstance(each, Heartbeat)]
    assert sum(len(each.models[0].model) == 100_000 for each in beats) == 200


async def test_the_loop_never_waits_for_the_socket():
    async with open_pair() as (client, engine, _, _):
        stream = client.submit("m", REQUEST, job_id="a")
        await engine.called()
        turns = threading.Thread(
            target=lambda: [engine.turn(delta("a", n)) for n in range(20_000)], daemon=True
        )
        turns.start()
        turns.join(10)  # no reads meanwhile: this loop is held here
        assert not turns.is_alive()
        await stream.aclose()

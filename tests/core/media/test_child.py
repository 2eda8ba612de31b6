"""Decode children under files that crash, hang, bloat and pry: each costs its own request alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from support import faulty_decoders
from support.child_processes import workers
from triptych.core.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    TriptychError,
    Unavailable,
)
from triptych.core.media import child
from triptych.core.media.child import DecodeLimits, DecodePool, FatalInput
from triptych.core.options.config import ServerOptions

TESTS = Path(faulty_decoders.__file__).parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def children() -> list[psutil.Process]:
    """Those of these tests: other tests' servers may still have some."""
    return workers(faulty_decoders.MODULE)


@asynccontextmanager
async def opened(
    num_children: int = 1, module: str = faulty_decoders.MODULE, **limits: Any
) -> AsyncIterator[DecodePool]:
    given = {"memory_bytes": 64 * 2**20, "cpu_s": 20, "wall_s": 60.0} | limits
    pool = DecodePool([module], num_children=num_children, limits=DecodeLimits(**given))
    try:
        yield pool
    finally:
        await pool.close()
    assert children() == []


async def pid_of(pool: DecodePool) -> int:
    """The process that answers now, which shows that one does."""
    decoded = await pool.run("echo", b"alive")
    assert bytes(decoded.data) == b"alive"
    return int(decoded.value)


def is_working(pool: DecodePool) -> bool:
    """Whether a child has been given to a request."""
    return any(job._child is not None for job in pool._jobs)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)


async def test_what_is_yielded_comes_back_in_order_and_what_is_returned_too():
    async with opened() as pool:
        data = bytes(range(256)) * 4096
        decoded = await pool.run("echo", memoryview(data), times=20)
        assert bytes(decoded.data) == data * 20
        assert decoded.value == children()[0].pid
        assert bytes((await pool.run("echo", b"")).data) == b""


@pytest.mark.parametrize(
    ("name", "kind", "reason", "is_replaced"),
    [
        ("refuse", InvalidRequest, "out of tune", False),
        ("stumble", FatalInput, "could not be decoded; it may be damaged", False),
        ("bloat", PayloadTooLarge, "too much memory", False),
        ("crash", FatalInput, "crash", True),
        ("leave", FatalInput, "crash", True),
        ("babble", FatalInput, "crash", True),
        ("lie", FatalInput, "crash", True),
        ("flood", PayloadTooLarge, "holds over 4194304 bytes", True),
        ("loop", FatalInput, "over 1 s to decode", True),
    ],
)
async def test_a_bad_file_costs_its_own_request_alone(name, kind, reason, is_replaced):
    async with opened(cpu_s=1, output_bytes=4 * 2**20) as pool:
        before = await pid_of(pool)
        with pytest.raises(TriptychError, match=reason) as caught:
            await pool.run(name, b"file")
        assert type(caught.value) is kind
        assert "/" not in caught.value.message
        assert (await pid_of(pool) != before) == is_replaced


async def test_what_takes_for_ever_without_work_is_given_up():
    async with opened(wall_s=1.5) as pool:
        with pytest.raises(Unavailable, match="reads files stalled") as caught:
            await pool.run("sleep", b"file")
        assert caught.value.retry_after_s
        await pid_of(pool)


async def test_what_stands_still_twice_is_given_up_long_before_its_deadline(monkeypatch):
    monkeypatch.setattr(child, "_MAX_STALLED_CHECKS", 2)
    async with opened(wall_s=10_000.0) as pool:
        with pytest.raises(Unavailable, match="stalled"):
            await pool.run("sleep", b"file")
        await pid_of(pool)


async def test_a_child_that_is_lost_twice_costs_its_request_and_no_other():
    async with opened(2) as pool:
        await pool.warm()
        sleeper = asyncio.create_task(pool.run("sleep", b"file"))
        await until(lambda: is_working(pool))
        other = await pid_of(pool)
        for _ in range(2):
            # In this order: a child of the second attempt is seen before it has started.
            await until(lambda: len(children()) == 2 and is_working(pool))
            (victim,) = (each for each in children() if each.pid != other)
            victim.send_signal(signal.SIGKILL)
            await until(lambda: not is_running(victim.pid))  # noqa: B023 - awaited here
        with pytest.raises(Unavailable, match="reads files was ended by signal 9"):
            await sleeper
        assert {await pid_of(pool) for _ in range(4)} == {other}


async def test_work_that_is_cancelled_is_not_done_once_more():
    async with opened() as pool:
        await pool.warm()
        (before,) = children()
        sleeper = asyncio.create_task(pool.run("sleep", b"file"))
        await until(lambda: is_working(pool))
        sleeper.cancel()
        await asyncio.gather(sleeper, return_exceptions=True)
        await until(lambda: not pool._jobs)
        assert not is_running(before.pid)
        assert children() == []


async def test_child_that_died_while_idle_is_replaced():
    async with opened() as pool:
        os.kill(before := await pid_of(pool), signal.SIGKILL)
        await until(lambda: psutil.Process(before).status() == psutil.STATUS_ZOMBIE)
        assert await pid_of(pool) != before


async def test_a_child_that_is_ending_gets_no_work(monkeypatch):
    async with opened() as pool:
        before = await pid_of(pool)
        (doomed,) = pool._idle
        monkeypatch.setattr(doomed._process, "kill", lambda: None)  # it has not arrived yet
        doomed.kill()
        assert await pid_of(pool) != before


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        *((what, "EMFILE") for what in ("read", "write", "network", "unix", "pipe", "memory")),
        ("program", "EMFILE"),
        ("raise", "ValueError"),
        ("print", "done"),  # to nowhere
    ],
)
async def test_a_child_reads_no_file_and_reaches_no_network(tmp_path, what, outcome):
    (path := tmp_path / "file").write_bytes(b"kept")
    async with opened() as pool:
        decoded = await pool.run("attempt", b"", what=what, path=str(path))
        assert decoded.value == outcome
        assert path.read_bytes() == b"kept"


@pytest.mark.parametrize("what", ["thread", "fork"])
async def test_a_child_starts_nothing(what):
    async with opened() as pool:
        assert (await pool.run("attempt", b"", what=what)).value in {"EAGAIN", "RuntimeError"}


async def test_a_child_learns_no_secret(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with opened() as pool:
        known = (await pool.run("environment", b"")).value
    assert "secret" not in known.values()


async def test_many_requests_share_few_children_and_a_crash_harms_one():
    async with opened(2, num_waiting=50) as pool:

        async def one(n: int) -> int:
            name = "crash" if n == 25 else "echo"
            decoded = await pool.run(name, b"%d" % n)
            assert bytes(decoded.data) == b"%d" % n
            return int(decoded.value)

        results = await asyncio.gather(*map(one, range(50)), return_exceptions=True)
        failures = {n: result for n, result in enumerate(results) if not isinstance(result, int)}
        assert list(failures) == [25]
        assert isinstance(failures[25], InvalidRequest)
        assert len(set(results) - {failures[25]}) <= 3
        assert len(children()) <= 2


async def test_only_so_many_may_wait():
    async with opened(num_waiting=2) as pool:
        waiting = [asyncio.create_task(pool.run("sleep", b"")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await pool.run("echo", b"")
        assert caught.value.status == 503
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await pid_of(pool)


async def test_cancelling_ends_the_work_and_frees_the_place():
    async with opened(num_waiting=1) as pool:
        before = await pid_of(pool)
        running = asyncio.create_task(pool.run("sleep", b""))
        waiting = asyncio.create_task(pool.run("sleep", b""))
        await until(lambda: is_working(pool))
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await pid_of(pool) != before
        assert len(children()) == 1


async def test_closing_fails_waiting_calls_and_leaves_no_process():
    async with opened(2) as pool:
        tasks = [asyncio.create_task(pool.run("sleep", b"")) for _ in range(5)]
        await until(lambda: len(children()) == 2)
        await pool.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Draining] * 5
        with pytest.raises(Draining):
            await pool.run("echo", b"")


async def test_cancelled_while_closing_is_cancelled():
    async with opened() as pool:
        task = asyncio.create_task(pool.run("sleep", b""))
        await asyncio.sleep(0.1)
        task.cancel()
        await pool.close()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_the_options_say_how_many_and_how_large():
    options = ServerOptions(num_decode_children=2, max_upload_bytes=10)
    pool = DecodePool.from_options(options, [faulty_decoders.MODULE])
    await pool.warm()
    assert len(children()) == 2
    with pytest.raises(PayloadTooLarge):
        await pool.run("echo", bytes(11))
    await pool.close()


async def test_a_child_retires():
    async with opened(num_requests_per_child=3) as pool:
        pids = [await pid_of(pool) for _ in range(7)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


async def test_children_start_when_needed_or_when_asked():
    async with opened(2) as pool:
        assert children() == []
        await pool.warm()
        assert len(children()) == 2


async def test_a_file_over_the_limit_is_not_sent():
    async with opened(input_bytes=10) as pool:
        with pytest.raises(PayloadTooLarge, match="over 10 bytes"):
            await pool.run("echo", bytes(11))
        assert children() == []


async def test_children_that_do_not_start_are_reported():
    async with opened(module="no_such_module") as pool:
        for attempt in (pool.warm, lambda: pool.run("echo", b"")):
            await _refused(attempt)


async def _refused(attempt: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(Unavailable, match="right now"):
        await attempt()


ORPHANS = """
import asyncio, os, psutil
from triptych.core.media.child import DecodePool

async def main():
    pool = DecodePool(["support.faulty_decoders"], num_children=2)
    await pool.warm()
    asyncio.create_task(pool.run("sleep", b""))
    await asyncio.sleep(0.2)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_no_child_outlives_its_parent():
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", ORPHANS, stdout=PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in (await parent.stdout.readline()).split()]
    parent.kill()
    await parent.communicate()
    assert len(pids) == 2
    await until(lambda: not any(map(is_running, pids)))

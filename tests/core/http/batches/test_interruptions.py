"""Batches that are interrupted: by a stop, a full store, a refusal, an engine that is down."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.batches import begin, ended, results, until
from support.http import FakeEngine, in_process
from support.stored_app import PATH, StoredApp, chat_line, make_stored_app, running
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import EngineDown, RateLimited, Unavailable
from triptych.core.http.batches import record as records
from triptych.core.http.batches import runner, work
from triptych.core.http.batches.gate import LineGate
from triptych.core.http.batches.lines import LineAnswer, LineRequest
from triptych.core.http.batches.record import KIND, BatchRecord
from triptych.core.http.batches.work import BatchWork
from triptych.core.store.clock import ExpiryClock, steady_s
from triptych.core.store.documents import DocumentTable, Key


@dataclass
class _Halting(FakeEngine):
    """An engine that answers so many jobs, and no more."""

    num_answered: int = 0

    async def _deltas(self, request: TokenRequest) -> AsyncGenerator[TokenDelta, None]:
        if len(self.submitted) > self.num_answered:
            await asyncio.Event().wait()
        async for delta in super()._deltas(request):
            yield delta


@pytest.mark.parametrize("keys", [("ann",), ("bob",)])
async def test_a_new_server_goes_on_where_the_last_one_stopped(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    engine = _Halting(answer="ok", num_answered=1)
    place = str(tmp_path / "store.db")
    folder = tmp_path / "model"
    made = make_stored_app(folder, engine, place=place, num_places=1, api_key=("ann", "bob"))
    headers = {"authorization": "Bearer ann"}
    async with running(made), in_process(made.app, **headers) as client:
        lines = [chat_line("a"), "{", chat_line("b"), chat_line("c")]
        batch = await begin(client, lines)
        await until(lambda: len(engine.submitted) == 2)
        at_stop = (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
    assert at_stop == {"total": 4, "completed": 1, "failed": 1}
    assert len(engine.cancelled) == 1
    engine.num_answered = 1000
    made = make_stored_app(folder, engine, place=place, api_key=keys)
    async with running(made), in_process(made.app, authorization=f"Bearer {keys[0]}") as client:
        if keys == ("bob",):
            assert made.store is not None
            await until(lambda: not made.batches.num_running)
            assert len(engine.submitted) == 2
            return
        batch = await ended(client, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        assert (await results(client, batch["output_file_id"])).keys() == {"a", "b", "c"}
        assert (await results(client, batch["error_file_id"])).keys() == {None}
        assert len(engine.finished) == 3, "what was answered is not asked again"


async def test_a_clock_that_leaps_ends_no_batch(tmp_path: Path) -> None:
    engine, place = _Halting(answer="ok", num_answered=0), str(tmp_path / "store.db")
    made = make_stored_app(tmp_path / "model", engine, place=place)
    async with running(made), in_process(made.app) as client:
        batch = await begin(client, [chat_line("a")])
        await until(lambda: len(engine.submitted) == 1)
    engine.num_answered = 1000
    made = make_stored_app(tmp_path / "model", engine, place=place)
    assert made.store is not None
    made.store._table._clock = ExpiryClock(
        lambda: time.time() + 2 * 86400, steady_s, ttl_s=3600.0, seen_s=time.time()
    )
    async with running(made), in_process(made.app) as client:
        assert (await ended(client, batch))["status"] == "completed"


async def has_all_places(made: StoredApp, num_places: int) -> bool:
    """Whether so many lines may run at once, as many as at the start."""
    gate = made.batches._gate
    assert gate is not None
    async with asyncio.timeout(2):
        for _ in range(num_places):
            await gate.enter()
    for _ in range(num_places):
        gate.leave()
    return True


async def test_a_line_that_ends_before_its_first_step_keeps_no_place(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(answer="x" * 1000), num_places=3, max_bytes=20_000)
    async with running(made), in_process(made.app) as client:
        batch = await ended(client, await begin(client, [chat_line(f"{n}") for n in range(60)]))
        assert batch["status"] == "failed"
        assert await has_all_places(made, 3)
        gate = LineGate(made.app.state.in_flight, 1)
        record = BatchRecord(
            id="batch_1",
            endpoint=PATH,
            input_file_id="file-1",
            completion_window="1h",
            ends_s=time.time() + 60,
            files_expire_s=time.time() + 60,
            times={},
        )
        batch_work = _Endless(made.user_files, Key(KIND, record.id, ""), record, max_line_bytes=100)
        with pytest.raises(OSError, match="begun"):
            await batch_work._answer_all(set(), _never, gate)
        await asyncio.wait_for(gate.enter(), timeout=1)


class _Endless(BatchWork):
    """A batch that is stopped between the start of a line's task and its first step."""

    async def _requests(self) -> AsyncGenerator[tuple[int, LineRequest], None]:
        yield 1, LineRequest("a", b"{}")
        raise OSError("before the task of the line has begun")


async def _never(_body: bytes) -> LineAnswer:
    raise AssertionError


@dataclass
class _Refusing(FakeEngine):
    """An engine that has no room for the requests of one caller's text."""

    def submit(self, model: str, request: TokenRequest, **about: Any) -> Any:
        if request.sampling.max_tokens == 7:
            raise RateLimited("Too much.", retry_after_s=30)
        return super().submit(model, request, **about)


async def test_refused_lines_stand_in_no_other_batchs_way(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, _Refusing(), num_places=2)
    async with running(made), in_process(made.app) as client:
        await begin(client, [chat_line(f"{n}", max_tokens=7) for n in range(9)])
        other = await begin(client, [chat_line(f"{n}") for n in range(9)])
        async with asyncio.timeout(5):
            assert (await ended(client, other))["request_counts"]["completed"] == 9
        assert await has_all_places(made, 2)


async def test_a_line_is_not_asked_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_TRIES_DOWN", 2)

    class Down(FakeEngine):
        """Down for good."""

        num_asked = 0

        def submit(self, *args: Any, **kwargs: Any) -> Any:
            self.num_asked += 1
            raise EngineDown("Down.", retry_after_s=0.0)

    engine = Down()
    made = make_stored_app(tmp_path, engine)
    monkeypatch.setattr(work, "_MAX_PAUSE_S", 0.01)
    async with running(made), in_process(made.app) as client:
        batch = await ended(client, await begin(client, [chat_line("a")]))
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        found = await results(client, batch["error_file_id"])
        assert found["a"]["response"]["status_code"] == 503
    assert engine.num_asked == 3


async def test_a_store_that_fails_for_a_while_ends_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever step it is that does not get through."""
    monkeypatch.setattr(runner, "STORE_PAUSE_S", 0.01)
    made = make_stored_app(tmp_path, FakeEngine())
    store = made.user_files.store
    call, failed = store.call, set()

    async def failing(task: Any, *args: Any, **kwargs: Any) -> Any:
        if task is not DocumentTable.get and task not in failed:
            failed.add(task)
            raise Unavailable("The disk does not answer.")
        return await call(task, *args, **kwargs)

    async with running(made), in_process(made.app) as client:
        lines = [chat_line(f"{n}") for n in range(5)]
        batch = await begin(client, lines)
        monkeypatch.setattr(store, "call", failing)
        batch = await ended(client, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert len(await results(client, batch["output_file_id"])) == 5
        assert {records.write, records.end} < failed


async def test_a_start_waits_for_a_store_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "STORE_PAUSE_S", 0.01)
    engine = FakeEngine(gate=threading.Event())
    assert engine.gate is not None
    made = make_stored_app(tmp_path, engine)
    async with running(made), in_process(made.app) as client:
        batch = await begin(client, [chat_line("a")])
        await until(lambda: len(engine.running) == 1)
        await made.batches.close()
        call, failures = made.user_files.store.call, [Unavailable("The disk does not answer.")] * 3

        async def failing(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return await call(*args, **kwargs)

        monkeypatch.setattr(made.user_files.store, "call", failing)
        await made.batches.start()
        engine.gate.set()
        await until(lambda: not failures)
        assert (await ended(client, batch))["status"] == "completed"


async def test_a_batch_that_nothing_runs_can_be_cancelled(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(gate=threading.Event()), num_places=1)
    async with running(made), in_process(made.app) as client:
        batch = await begin(client, [chat_line("a")])
        await until(lambda: made.batches.num_running == 1)
        await made.batches.close()
        assert not made.batches.num_running
        await client.post(f"/v1/batches/{batch['id']}/cancel")
        assert (await ended(client, batch))["status"] == "cancelled"

"""Batches from their file to their files, in front of an engine that makes answers up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.http import ANSWER, FakeEngine, chat, in_process, live, refused
from support.stored_app import PATH, StoredApp, chat_line, jsonl, make_stored_app, running
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import EngineDown, Overloaded, RateLimited, Unavailable
from triptych.core.http.batches import record as records
from triptych.core.http.batches import runner, work
from triptych.core.http.batches.gate import LineGate
from triptych.core.http.batches.lines import LineAnswer, LineRequest, LineSplitter
from triptych.core.http.batches.record import KIND, BatchRecord
from triptych.core.http.batches.work import BatchWork
from triptych.core.http.disconnect import InFlight
from triptych.core.limits import MAX_ACTIVE_BATCHES, MAX_PRIORITY
from triptych.core.store.clock import ExpiryClock, steady_s
from triptych.core.store.documents import DocumentTable, Key

Batch = dict[str, Any]


async def upload(client: httpx.AsyncClient, lines: Iterable[Any], purpose: str = "batch") -> str:
    files = {"file": ("in.jsonl", jsonl(lines))}
    reply = await client.post("/v1/files", data={"purpose": purpose}, files=files)
    return str(reply.json()["id"])


async def begin(client: httpx.AsyncClient, lines: Iterable[Any], **fields: Any) -> Batch:
    body = {"input_file_id": await upload(client, lines), "endpoint": PATH} | fields
    reply = await client.post("/v1/batches", json={"completion_window": "24h", **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def ended(client: httpx.AsyncClient, batch: Batch) -> Batch:
    """The batch, once it is over."""
    async with asyncio.timeout(20):
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def results(client: httpx.AsyncClient, file_id: str | None) -> dict[str | None, Any]:
    """What a file of results says of each line, by custom id."""
    if file_id is None:
        return {}
    text = (await client.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({each["id"] for each in found}) == len(found), "a line is answered once"
    return {each["custom_id"]: each for each in found}


def test_the_package_runs_a_batch(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(), api_key=("ann", "bob"))
    lines = [
        chat_line("good-1"),
        chat_line("good-2", n=2),
        '{"custom_id": ',
        chat_line("nobody", model="absent"),
        "",
        chat_line("streams", stream=True),
        chat_line("good-1"),
        chat_line("hot", temperature=9),
    ]
    with live(made.app) as server, httpx.Client(verify=False) as http:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="ann", max_retries=0, http_client=http
        )
        file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"project": "x"},
        )
        assert batch.object == "batch"
        assert batch.status in ("validating", "in_progress")
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (7, 2, 5)
        assert batch.metadata == {"project": "x"}
        assert batch.expires_at == batch.created_at + 86400
        assert batch.completed_at is not None
        assert batch.errors is None
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
        good = [
            json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()
        ]
        assert {each["custom_id"] for each in good} == {"good-1", "good-2"}
        for each in good:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["request_id"]
            choices = each["response"]["body"]["choices"]
            assert choices[0]["message"]["content"] == ANSWER
            assert len(choices) == (2 if each["custom_id"] == "good-2" else 1)
        bad = [json.loads(line) for line in client.files.content(batch.error_file_id).iter_lines()]
        faults = {each["custom_id"]: each for each in bad}
        assert faults.keys() == {None, "nobody", "streams", "good-1", "hot"}
        assert faults[None]["error"]["code"] == "invalid_request"
        assert faults["streams"]["error"]["param"] == "stream"
        assert faults["good-1"]["error"]["param"] == "custom_id"
        assert faults["nobody"]["response"]["status_code"] == 404
        assert faults["nobody"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert faults["hot"]["response"]["body"]["error"]["param"] == "temperature"
        assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
        bob = client.with_options(api_key="bob")
        assert list(bob.batches.list()) == []
        with pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
        metrics = http.get(f"{server.url}/metrics", headers={"authorization": "Bearer ann"}).text
    assert 'route="/v1/chat/completions",status="200"} 2.0' in metrics, "lines count as requests"
    assert made.store is not None
    asyncio.run(made.store.close())


async def test_lines_run_in_their_callers_name_behind_all_others(tmp_path: Path) -> None:
    engine = FakeEngine()
    made = make_stored_app(tmp_path, engine, api_key=("ann", "bob"))
    async with running(made), in_process(made.app, authorization="Bearer ann") as client:
        await ended(client, await begin(client, [chat_line("a")]))
        await client.post(PATH, json=chat())
    line, own = engine.submitted.values()
    assert line.tenant == own.tenant != ""
    assert (line.priority, own.priority) == (MAX_PRIORITY, 0)


async def test_no_more_lines_run_at_once_than_have_a_place(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    made = make_stored_app(tmp_path, engine, num_places=3)
    async with running(made), in_process(made.app) as client:
        batches = [await begin(client, [chat_line(f"{n}") for n in range(5)]) for _ in range(2)]
        await until(lambda: len(engine.running) == 3)
        await asyncio.sleep(0.05)
        assert len(engine.running) == 3
        assert engine.gate is not None
        engine.gate.set()
        for batch in batches:
            assert (await ended(client, batch))["request_counts"]["completed"] == 5


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of it
            await asyncio.sleep(0.005)


async def test_lines_give_way_to_clients(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    assert engine.gate is not None
    made = make_stored_app(tmp_path, engine)
    async with running(made), in_process(made.app) as client:
        asked = asyncio.create_task(client.post(PATH, json=chat()))
        await until(lambda: len(engine.running) == 1)
        batch = await begin(client, [chat_line("a")])
        await asyncio.sleep(0.05)
        assert len(engine.submitted) == 1, "a client is waiting"
        engine.gate.set()
        assert (await asked).status_code == 200
        assert (await ended(client, batch))["status"] == "completed"


async def test_a_line_does_not_give_way_for_ever() -> None:
    in_flight = InFlight()
    in_flight.quiet.clear()
    gate = LineGate(in_flight, 1, patience_s=0.01)
    await gate.enter()
    waiting = asyncio.create_task(gate.enter())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "there is one place"
    gate.leave()
    await waiting


async def test_a_cancelled_batch_keeps_what_was_answered(tmp_path: Path) -> None:
    engine = FakeEngine(is_endless=True, step_s=0.001)
    made = make_stored_app(tmp_path, engine, num_places=1)
    async with running(made), in_process(made.app) as client:
        batch = await begin(client, [chat_line("a", max_tokens=1), chat_line("b"), chat_line("c")])
        await until(lambda: len(engine.submitted) == 2)
        reply = await client.post(f"/v1/batches/{batch['id']}/cancel")
        assert reply.json()["status"] in ("cancelling", "cancelled")
        batch = await ended(client, batch)
        assert batch["status"] == "cancelled"
        assert batch["cancelled_at"] >= batch["cancelling_at"]
        assert batch["error_file_id"] is None, "nothing went wrong"
        assert "a" in await results(client, batch["output_file_id"])
        assert not engine.running
        again = refused(await client.post(f"/v1/batches/{batch['id']}/cancel"))
        assert again["param"] == "batch_id"


async def test_a_batch_ends_with_its_window(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    made = make_stored_app(tmp_path, engine, num_places=1)
    async with running(made), in_process(made.app) as client:
        lines = ["{", *(chat_line(f"{n}") for n in range(300))]
        batch = await ended(client, await begin(client, lines, completion_window="1s"))
        assert batch["status"] == "expired"
        assert batch["expired_at"]
        assert batch["output_file_id"] is None
        assert batch["request_counts"] == {"total": 301, "completed": 0, "failed": 301}
        faults = await results(client, batch["error_file_id"])
        codes = {custom_id: each["error"]["code"] for custom_id, each in faults.items()}
        late = {f"{n}": "batch_expired" for n in range(300)}
        assert codes == {None: "invalid_request", **late}
        assert not engine.running


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


async def test_a_full_server_is_asked_again(tmp_path: Path) -> None:
    class Full(FakeEngine):
        """Full at first."""

        num_refused = 0

        async def submit(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            self.num_refused += 1
            if self.num_refused <= 1:
                raise Overloaded("Full.", retry_after_s=1)
            async for output in super().submit(*args, **kwargs):
                yield output

    made = make_stored_app(tmp_path, Full())
    async with running(made), in_process(made.app) as client:
        batch = await ended(client, await begin(client, [chat_line("a")]))
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.parametrize(
    ("lines", "code"), [([], "invalid_input_file"), (["", "  "], "invalid_input_file")]
)
async def test_a_file_without_lines_is_no_batch(
    tmp_path: Path, lines: list[str], code: str
) -> None:
    made = make_stored_app(tmp_path, FakeEngine())
    async with running(made), in_process(made.app) as client:
        batch = await ended(client, await begin(client, lines))
        assert batch["status"] == "failed"
        (fault,) = batch["errors"]["data"]
        assert fault["code"] == code
        assert batch["output_file_id"] is batch["error_file_id"] is None


async def test_there_is_room_to_say_that_there_is_no_room(tmp_path: Path) -> None:
    """Whatever it is that does not fit: the files of results, or a result."""
    codes = []
    for max_bytes in range(4800, 7000, 200):
        made = make_stored_app(tmp_path, FakeEngine(answer="x" * 40), max_bytes=max_bytes)
        async with running(made), in_process(made.app) as client:
            file_id = await upload(client, [chat_line(f"{n}") for n in range(9)])
            body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
            batch = await ended(client, (await client.post("/v1/batches", json=body)).json())
            codes.append(batch["errors"]["data"][0]["code"])
    assert set(codes) == {"store_full"}


async def test_a_full_store_fails_the_batch_and_nothing_else(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(answer="x" * 1000), max_bytes=20_000)
    async with running(made), in_process(made.app) as client:
        batch = await ended(client, await begin(client, [chat_line(f"{n}") for n in range(60)]))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "store_full"
        assert 0 < batch["request_counts"]["completed"] < 60
        assert len(await results(client, batch["output_file_id"])) > 0
        assert (await client.post(PATH, json=chat())).status_code == 200


async def test_an_input_file_that_goes_ends_the_batch(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    assert engine.gate is not None
    made = make_stored_app(tmp_path, engine, num_places=1)
    async with running(made), in_process(made.app) as client:
        long = [chat_line(f"{n}", "x" * 3000) for n in range(300)]  # more than a piece of the store
        batch = await begin(client, long)
        await until(lambda: len(engine.running) == 1)
        await client.delete(f"/v1/files/{batch['input_file_id']}")
        engine.answer = "x"
        engine.gate.set()
        batch = await ended(client, batch)
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "input_file_deleted"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"input_file_id": "file-absent"}, "file_id"),
        ({"metadata": {"a": "x" * 600}}, "metadata.a"),
        ({"priority": 1}, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
    ],
)
async def test_what_is_wrong_with_a_batch_is_named(
    tmp_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    made = make_stored_app(tmp_path, FakeEngine())
    async with running(made), in_process(made.app) as client:
        body = {"input_file_id": await upload(client, [chat_line("a")]), "endpoint": PATH}
        body |= {"completion_window": "24h"} | fields
        reply = await client.post("/v1/batches", json=body)
        error = refused(reply, 404 if "input_file_id" in fields else 400)
        assert error["param"] == (param or "output_expires_after.seconds")
        other = {**body, "input_file_id": await upload(client, [], "vision")}
        if "input_file_id" in fields:
            assert refused(await client.post("/v1/batches", json=other))["param"] == "input_file_id"


async def test_an_id_belongs_to_the_first_line_that_has_it(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(), num_places=4)
    async with running(made), in_process(made.app) as client:
        first = chat_line("a", "x" * 100_000, temperature=9)  # takes longer to read than the next
        batch = await ended(client, await begin(client, [first, chat_line("a"), chat_line("b")]))
        text = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text
        by_line = {each["id"][-1]: each for each in map(json.loads, text.splitlines())}
        assert by_line["1"]["response"]["body"]["error"]["param"] == "temperature"
        assert by_line["2"]["error"]["param"] == "custom_id"


async def test_a_file_of_short_lines_does_not_block_the_loop(tmp_path: Path) -> None:
    """The loop goes on while a file comes apart; what is over the bound is not even read."""
    made = make_stored_app(tmp_path, FakeEngine())
    async with running(made), in_process(made.app) as client:
        pushed: list[int] = []
        push = LineSplitter.push

        def counted(splitter: LineSplitter, piece: bytes) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            pushed.append(len(piece))
            return push(splitter, piece)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LineSplitter, "push", counted)
            batch = await ended(client, await begin(client, ["a"] * 1_000_000))
        assert "over 50000 lines" in batch["errors"]["data"][0]["message"]
        assert 2 * 50_000 <= sum(pushed) < 2 * 1_000_000


async def test_the_counts_are_what_the_files_have(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(answer="x" * 1000), max_bytes=20_000)
    async with running(made), in_process(made.app) as client:
        batch = await ended(client, await begin(client, [chat_line(f"{n}") for n in range(60)]))
        assert batch["status"] == "failed"
        counted = batch["request_counts"]["completed"]
        assert counted == len(await results(client, batch["output_file_id"])) > 0


async def test_so_many_batches_of_one_key_and_no_more_wait(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    made = make_stored_app(tmp_path, engine, api_key=("alice", "bob"))
    async with running(made), in_process(made.app) as client:
        client.headers["authorization"] = "Bearer alice"
        file_id = await upload(client, [chat_line("a")])
        body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
        replies = [await client.post("/v1/batches", json=body) for _ in range(MAX_ACTIVE_BATCHES)]
        made_ids = [reply.json()["id"] for reply in replies]
        assert refused(await client.post("/v1/batches", json=body), 503)["code"] == "overloaded"
        client.headers["authorization"] = "Bearer bob"
        await begin(client, [chat_line("a")])
        client.headers["authorization"] = "Bearer alice"
        first = (await client.get("/v1/batches", params={"limit": 20})).json()
        assert [each["id"] for each in first["data"]] == made_ids[:-21:-1]
        assert first["has_more"]
        rest = (
            await client.get("/v1/batches", params={"limit": 100, "after": first["last_id"]})
        ).json()
        assert [each["id"] for each in rest["data"]] == made_ids[-21::-1]
        assert not rest["has_more"]


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


async def test_refused_lines_stand_in_nobodys_way(tmp_path: Path) -> None:
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


async def test_a_line_takes_longer_than_a_client_waits(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    assert engine.gate is not None
    made = make_stored_app(tmp_path, engine, request_timeout_s=0.2)
    async with running(made), in_process(made.app) as client:
        batch = await begin(client, [chat_line("a")])
        await until(lambda: len(engine.running) == 1)
        await asyncio.sleep(0.4)
        engine.gate.set()
        assert (await ended(client, batch))["request_counts"]["completed"] == 1
    assert engine.deadlines_s == [None]

"""Batches from their file to their files, in front of an engine that makes answers up."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.batches import begin, ended, results, until, upload
from support.http import ANSWER, FakeEngine, chat, in_process, live, refused
from support.stored_app import PATH, chat_line, jsonl, make_stored_app, running
from triptych.core.errors import Overloaded
from triptych.core.http.batches.gate import LineGate
from triptych.core.http.batches.lines import LineSplitter
from triptych.core.http.disconnect import InFlight
from triptych.core.limits import MAX_ACTIVE_BATCHES, MAX_PRIORITY

MIXED = [
    chat_line("good-1"),
    chat_line("good-2", n=2),
    '{"custom_id": ',
    chat_line("lost", model="absent"),
    "",
    chat_line("streams", stream=True),
    chat_line("good-1"),
    chat_line("hot", temperature=9),
]


def run_with_the_package(client: openai.OpenAI, file_id: str) -> openai.types.Batch:
    """The batch, once it is completed."""
    batch = client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"project": "x"},
    )
    assert batch.object == "batch"
    assert batch.status in ("validating", "in_progress")
    while batch.status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing")
        batch = client.batches.retrieve(batch.id)
    return batch


def check_record(batch: openai.types.Batch) -> None:
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (7, 2, 5)
    assert batch.metadata == {"project": "x"}
    assert batch.expires_at == batch.created_at + 86400
    assert batch.completed_at is not None
    assert batch.errors is None


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str | None, Any]:
    """The lines of a file of results, by custom id."""
    assert file_id is not None
    lines = map(json.loads, client.files.content(file_id).iter_lines())
    return {each["custom_id"]: each for each in lines}


def check_answers(good: dict[str | None, Any]) -> None:
    assert good.keys() == {"good-1", "good-2"}
    for custom_id, each in good.items():
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["request_id"]
        choices = each["response"]["body"]["choices"]
        assert choices[0]["message"]["content"] == ANSWER
        assert len(choices) == (2 if custom_id == "good-2" else 1)


def check_faults(faults: dict[str | None, Any]) -> None:
    assert faults.keys() == {None, "lost", "streams", "good-1", "hot"}
    assert faults[None]["error"]["code"] == "invalid_request"
    assert faults["streams"]["error"]["param"] == "stream"
    assert faults["good-1"]["error"]["param"] == "custom_id"
    assert faults["lost"]["response"]["status_code"] == 404
    assert faults["lost"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert faults["hot"]["response"]["body"]["error"]["param"] == "temperature"


def check_privacy(client: openai.OpenAI, batch: openai.types.Batch) -> None:
    """Another key sees neither the batch nor its file."""
    assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
    bob = client.with_options(api_key="bob")
    assert list(bob.batches.list()) == []
    with pytest.raises(openai.NotFoundError):
        bob.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )


def test_the_package_runs_a_batch(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(), api_key=("ann", "bob"))
    with live(made.app) as server, httpx.Client(verify=False) as http:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="ann", max_retries=0, http_client=http
        )
        file = client.files.create(file=("in.jsonl", jsonl(MIXED)), purpose="batch")
        batch = run_with_the_package(client, file.id)
        check_record(batch)
        assert batch.output_file_id is not None
        assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
        check_answers(lines_of(client, batch.output_file_id))
        check_faults(lines_of(client, batch.error_file_id))
        check_privacy(client, batch)
        metrics = http.get(f"{server.url}/metrics", headers={"authorization": "Bearer ann"}).text
    assert 'route="/v1/chat/completions",status="200"} 2.0' in metrics, "lines count as requests"
    assert made.store is not None
    asyncio.run(made.store.close())


async def test_lines_run_in_their_callers_name_behind_all_others(tmp_path: Path) -> None:
    engine = FakeEngine()
    made = make_stored_app(tmp_path, engine, api_key=("ann", "bob"))
    async with running(made), in_process(made.app, authorization="Bearer ann") as client:
        await ended(client, await begin(client, [chat_line("a")]))
        await ended(client, await begin(client, [chat_line("a", priority=3)]))
        await client.post(PATH, json=chat())
    line, chosen, own = engine.submitted.values()
    assert line.tenant == own.tenant != ""
    assert (line.priority, chosen.priority, own.priority) == (-MAX_PRIORITY, -3, 0)


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
    for max_bytes in range(4800, 7000, 400):
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


async def test_a_line_takes_longer_than_a_client_waits(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    assert engine.gate is not None
    made = make_stored_app(tmp_path, engine, request_timeout_s=1.0)
    async with running(made), in_process(made.app) as client:
        batch = await begin(client, [chat_line("a")])
        await until(lambda: len(engine.running) == 1)
        await asyncio.sleep(1.2)
        engine.gate.set()
        assert (await ended(client, batch))["request_counts"]["completed"] == 1
    assert engine.deadlines_s == [None]

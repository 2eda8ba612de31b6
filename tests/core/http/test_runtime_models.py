"""Models that come and go over HTTP, with a made-up fetch and a made-up engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.http import READY, FakeEngine, in_process, make_app
from triptych.core.engine_api.model_changes import AddModel, RemoveModel, Sleep, Wake
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.errors import InvalidRequest, UnsupportedOption, WeightsError
from triptych.core.http.models import ModelCard
from triptych.core.http.runtime_models import MAX_MODELS, MAX_PULLS, Pull, RuntimeModels
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.core.weights.fetching import FetchOrder, FetchProgress
from triptych.core.weights.pull_policy import check_may_pull
from triptych.core.weights.resolve import ResolvedModel

PULL = "/v1/engine/pull"


class FakeParts:
    """Routes that open any model but `bad`; remembers which are there."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    def open(self, model: ResolvedModel) -> tuple[ModelCard, Callable[[], None]]:
        if model.name == "bad":
            raise WeightsError("It has no tokenizer.json.")
        return ModelCard(id=model.name, task="chat"), lambda: self.joined.append(model.name)

    def has_further(self, name: str) -> bool:
        return name == "adapter"

    async def drop(self, name: str) -> None:
        if name in self.joined:
            self.joined.remove(name)


class World:
    """An app whose fetches wait for `gate` and count how many were ended early."""

    def __init__(self, folder: Path, **server: Any) -> None:
        self.engine = FakeEngine()
        self.app: FastAPI = make_app(folder / "tiny", self.engine, **server)
        self.gate = asyncio.Event()
        self.orders: list[FetchOrder] = []
        self.num_cut = 0
        self.cache = folder / "cache"
        self.seen: list[list[str]] = []
        self.models = self.app.state.runtime_models = RuntimeModels(
            config=Config(models=ModelOptions(cache_dir=str(self.cache))),
            client=self.engine,
            served=self.app.state.served,
            parts=FakeParts(),
            models={},
            sources=["named"],
            fetch=self.fetch,
            on_change=lambda models: self.seen.append([model.name for model in models]),
        )

    async def fetch(self, order: FetchOrder) -> AsyncGenerator[FetchProgress | ResolvedModel, None]:
        self.orders.append(order)
        try:
            yield FetchProgress(action="Downloading", num_bytes=5, total_bytes=10)
            await self.gate.wait()
            yield ResolvedModel(
                name=order.name, reference=order.reference, folder="/none", digest="00"
            )
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cut += not self.gate.is_set()
            raise


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_progress_then_the_model_is_listed_and_leaves_again(world: World) -> None:
    async with in_process(world.app) as client:
        asking = asyncio.create_task(client.post(PULL, json={"model": "org/new"}))
        while not world.orders:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # so that its progress is shown
        world.gate.set()
        events = (await asking).text.split("\n\n")
        data = [json.loads(each.partition("data: ")[2]) for each in events if each]
        assert [each["type"] for each in data] == ["engine.pull.progress", "engine.pull.completed"]
        assert (data[0]["num_bytes"], data[1]["model"]["id"]) == (5, "org/new")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "org/new"]
        again = await client.post(PULL, json={"model": "org/new", "stream": False})
        assert (again.json()["id"], len(world.orders)) == ("org/new", 1)
        gone = await client.delete("/v1/models/org/new")
        assert gone.json()["deleted_bytes"] is None  # its folder is in no cache
        assert (await client.delete("/v1/models/org/new")).status_code == 404
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
    assert [type(each) for each in world.engine.changes] == [AddModel, RemoveModel]
    assert world.seen == [["org/new"], []]


async def test_readers_of_one_fetch_share_it_and_the_last_one_ends_it(world: World) -> None:
    first = world.models.pull("org/new")
    assert isinstance(first, Pull)
    assert world.models.pull("org/new") is first
    readers = [first.follow(), first.follow()]
    for reader in readers:
        await anext(reader)
    await readers[0].aclose()
    await asyncio.sleep(0.01)
    assert not first.task.done()
    await readers[1].aclose()
    second = world.models.pull("org/new")  # while the first is still being ended
    assert isinstance(second, Pull)
    assert second is not first
    await asyncio.gather(first.task, return_exceptions=True)
    assert (world.num_cut, world.engine.changes) == (1, [])
    assert world.models.pull("org/new") is second
    world.gate.set()
    *_, card = [note async for note in second.follow()]
    assert isinstance(card, ModelCard)
    await world.models.close()


async def test_a_model_that_cannot_be_served_is_refused_in_a_sentence(world: World) -> None:
    world.gate.set()
    async with in_process(world.app) as client:
        reply = await client.post(PULL, json={"model": "x/y", "name": "bad", "stream": False})
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "model_refused")
        assert reply.json()["error"]["message"] == "It has no tokenizer.json."
    assert world.engine.changes == []
    assert list(world.app.state.served.cards) == ["tiny"]


async def test_names_and_numbers_are_limited(world: World) -> None:
    world.models.models["own"] = ResolvedModel(
        name="own", reference="org/own", folder="/none", digest="00"
    )
    async with in_process(world.app) as client:
        taken = await client.post(PULL, json={"model": "org/new", "name": "own"})
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")
        taken = await client.post(PULL, json={"model": "org/new", "name": "adapter"})
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")
        for n in range(MAX_PULLS):
            world.models.pull(f"org/{n}")
        many = await client.post(PULL, json={"model": "org/more"})
        assert many.json()["error"]["code"] == "overloaded"
        await world.models.close()
        world.models.models |= {str(n): world.models.models["own"] for n in range(MAX_MODELS)}
        full = await client.post(PULL, json={"model": "org/more"})
        assert f"{MAX_MODELS} models are served" in full.json()["error"]["message"]
    await world.models.close()


@pytest.mark.parametrize(
    ("reference", "revision", "is_refused"),
    [
        ("org/own", "main", False),
        ("org/own", "v2", True),
        ("org/coming", "v1", False),
        ("org/coming", "v2", True),
        ("pypi:package==1.0", "v1", True),
    ],
)
async def test_a_revision_is_that_of_the_model_or_refused(
    world: World, reference: str, revision: str, is_refused: bool
) -> None:
    own = ResolvedModel(name="org/own", reference="org/own", folder="/none", digest="00")
    world.models.models["org/own"] = own
    world.models.served.add(ModelCard(id="org/own", task="chat"))
    world.models.config = Config(models=ModelOptions(revision="main"))
    world.models.pull("org/coming", revision="v1")
    with pytest.raises(InvalidRequest, match="revision") if is_refused else nullcontext():
        world.models.pull(reference, revision=revision)
    await world.models.close()


async def test_only_admins_change_models_and_without_keys_only_this_machine(tmp_path: Path) -> None:
    world = World(tmp_path, api_key=("user",), admin_key=("boss",))
    world.gate.set()
    calls = (
        ("POST", PULL, {"model": "org/new", "stream": False}),
        ("DELETE", "/v1/models/org/new", None),
        ("POST", "/v1/engine/load", {"model": "tiny"}),
        ("POST", "/wake_up", None),
    )
    async with in_process(world.app) as client:
        for method, path, body in calls:
            keys = {}
            for key in ("user", "boss"):
                headers = {"authorization": f"Bearer {key}"}
                keys[key] = await client.request(method, path, json=body, headers=headers)
            assert keys["user"].json()["error"]["code"] == "admin_key_required", path
            assert keys["boss"].status_code == 200, keys["boss"].text
    open_app = World(tmp_path).app
    for host, status in (("10.0.0.9", 403), ("::ffff:127.0.0.1", 404), ("::1", 404)):
        transport = httpx.ASGITransport(open_app, client=(host, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            assert (await client.delete("/v1/models/other")).status_code == status, host


async def test_sleep_and_wake_by_the_names_of_both_servers(world: World) -> None:
    def beat(phase: str) -> Heartbeat:
        return Heartbeat(
            turn=1,
            phase=phase,
            stall_budget_s=1.0,
            num_jobs=0,
            models=(),
            gauges={},
            counters={},
            histograms={},
        )

    def show(phase: str) -> None:
        world.engine.state = replace(READY, last_beat=beat(phase))

    async with in_process(world.app) as client:
        for down, up in (
            ("/sleep?level=2&mode=abort", "/wake_up?tags=weights&tags=kv_cache"),
            ("/release_memory_occupation", "/resume_memory_occupation"),
        ):
            show("sleep")
            assert (await client.post(down)).json() == {"is_sleeping": True}
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            show("idle")
            assert (await client.post(up)).json() == {"is_sleeping": False}
        for path in ("/wake_up?tags=weights", "/sleep?level=3", "/sleep?mode=keep"):
            assert (await client.post(path)).status_code == 400, path
    assert world.engine.changes == [Sleep(ends_jobs=True), Wake(), Sleep(), Wake()]


@pytest.mark.parametrize(
    ("reference", "needed"),
    [
        ("named", "names"),
        ("embedded", "names"),
        ("other=pypi:pack==1.0", "packages"),
        ("org/model", "hub"),
        ("{root}/allowed/model", "none"),
        ("{root}/allowed/../other", ""),
        ("{root}/link", ""),
        ("~/model", ""),
        ("~no-such-user/model", ""),
        ("model.gguf", ""),
        ("tests", ""),
    ],
)
def test_what_may_be_fetched(
    reference: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    (tmp_path / "allowed").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    allowed = []
    for source in ("none", "names", "packages", "hub"):
        options = ServerOptions(pull_from=source, pull_folder=(str(tmp_path / "allowed"),))
        try:
            check_may_pull(reference.format(root=tmp_path), ["named"], options)
        except UnsupportedOption:
            continue
        allowed.append(source)
    assert (allowed[0] if allowed else "") == needed

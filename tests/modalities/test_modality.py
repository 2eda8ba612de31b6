"""A modality is a folder and a line: one that is in the registry is served, whatever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import triptych
from support import toy_modality
from support.http import FakeEngine, chat, in_process
from support.text_models import write_text_folder
from support.toy_modality import COUNTING, CountDelta, CountRequest
from triptych import cli
from triptych.compose import build_app, build_codec, build_engine
from triptych.core.engine_api.job import Job, Output
from triptych.core.errors import WeightsError
from triptych.core.options.config import Config, DeviceOptions
from triptych.core.transport.messages import Outputs
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities import registry
from triptych.schedulers.local import LocalClient


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MODALITIES", (COUNTING, *registry.MODALITIES))


@pytest.fixture
def counter(tmp_path: Path) -> ResolvedModel:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "counter"}))
    return ResolvedModel(name="one-two", reference="x", folder=str(tmp_path), digest="0")


def test_it_is_recognized_and_offered(counter: ResolvedModel) -> None:
    assert registry.role_of(counter) == "counting"
    assert "" not in registry.default_models(), "one without a default is served when it is named"


def test_a_type_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = write_text_folder(tmp_path, model_type=["llama"])
    with pytest.raises(WeightsError, match="model_type is not a text"):
        registry.role_of(folder)


async def test_it_is_served_by_its_own_halves(counter: ResolvedModel) -> None:
    config = Config(device=DeviceOptions(device="cpu"))
    client = LocalClient(build_engine(config, [counter]))
    app = build_app(config, [counter], client)
    async with in_process(app) as http:
        reply = await http.post("/v1/count", json={"model": "one-two", "last": 4})
        assert reply.json() == [1, 2, 3, 4]
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["task"]) for card in listed] == [("one-two", "counting")]
    await app.state.close()
    await client.close()


async def test_other_routes_name_the_model_kind(counter: ResolvedModel, tmp_path: Path) -> None:
    text = write_text_folder(tmp_path / "text", hidden_size=8)
    app = build_app(Config(), [counter, text], FakeEngine())
    async with in_process(app) as http:
        reply = await http.post("/v1/chat/completions", json={**chat(), "model": "one-two"})
        assert "one-two counts: post to /v1/count" in reply.json()["error"]["message"]
        tasks = app.openapi()["components"]["schemas"]["ModelCard"]["properties"]["task"]["enum"]
        assert "counting" in tasks
    await app.state.close()


def test_its_messages_cross_between_the_processes() -> None:
    codec = build_codec()
    submit = Job(job_id="a", model="one-two", request=CountRequest(3))
    assert codec.to_engine(codec.encode(submit)) == submit
    outputs = Outputs((Output(job_id="a", payload=CountDelta(1)),))
    assert codec.from_engine(codec.encode(outputs)) == outputs


def test_its_command_and_its_pipeline_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "MODALITIES", registry.MODALITIES)
    monkeypatch.setattr(cli, "COMMANDS", cli.all_commands())
    assert cli.main(["count", "3"]) == 0
    assert capsys.readouterr().out == "1 2 3\n"
    assert triptych.CountPipeline is toy_modality.CountPipeline

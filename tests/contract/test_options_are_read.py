"""No option is declared and then ignored: the models it is for read it, and others need not.

A tiny model of each kind is served in this process, on a configuration that remembers what was read
off it. An option with `roles` must be read where such a model is loaded and asked, and by no engine
without one; every other option by somebody.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trustme
from msgspec import structs

from support import lora_files
from support.asr import noise, wav, write_folder
from support.embedding_models import save, save_decoder
from support.http import in_process
from support.image_folders import save_pipeline
from support.image_runner import PIPELINE
from support.images import image, saved
from support.speech_models import orpheus
from support.text_models import byte_tokenizer, write_text_folder
from support.vision_folders import data_url, shown, write_vision_folder
from support.watched_config import watched
from triptych import serve
from triptych.compose import build_app, build_engine
from triptych.core.bundle.resolve import resolve_all
from triptych.core.errors import SetupError
from triptych.core.http.tls import tls_context
from triptych.core.options.config import (
    AdapterOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ServerOptions,
)
from triptych.core.options.declaration import ROLES, Role
from triptych.core.options.table import Resolved, declared
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.pull_policy import check_may_pull
from triptych.modalities.registry import resolve_models, role_of
from triptych.replicas.plan import ReplicaPlan
from triptych.schedulers.local import LocalClient

NAME = "tiny"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model (as `save` leaves it in a folder, or by name) and what is asked of it."""

    path: str
    body: Mapping[str, Any]
    save: Callable[[Path], Any] | None = None
    name: str = ""
    adapters: AdapterOptions = field(default_factory=AdapterOptions)


def _save_chat(folder: Path) -> None:
    write_text_folder(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=259, max_position_embeddings=256, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def _save_orpheus(folder: Path) -> None:
    orpheus(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def _save_image(folder: Path) -> None:
    denoiser = save_pipeline(folder, PIPELINE)["transformer"]
    path = lora_files.layers(denoiser, "to_q")[:1]
    tensors = lora_files.peft_keys("transformer", denoiser, path)
    lora_files.save_adapter(folder.parent / "ink.safetensors", tensors)


MESSAGES = [{"role": "user", "content": "hi"}]
WHOLE = {"ignore_eos": True}  # an answer that ends with its first token has no time between two
CASES: Mapping[Role, tuple[Case, ...]] = {
    "chat": (
        Case(
            path="/v1/chat/completions",
            body={"json": {"messages": MESSAGES, "max_tokens": 4, "stream": True, **WHOLE}},
            save=_save_chat,
        ),
    ),
    "vision": (
        Case(
            path="/v1/chat/completions",
            body={"json": shown(data_url(saved(image())), **WHOLE)},
            save=write_vision_folder,
        ),
    ),
    "embedding": (
        Case(
            path="/v1/embeddings",
            body={"json": {"input": "w1 w2"}},
            save=lambda folder: save(folder, pooling_mode_mean_tokens=True),
        ),
        Case(
            path="/v1/embeddings",
            body={"json": {"input": "w1 w2"}},
            save=lambda folder: save_decoder(folder, has_modules=True),
        ),
    ),
    "speech": (
        Case(
            path="/v1/audio/speech",
            body={"json": {"input": "Hi.", "voice": "alloy"}},
            name="triptych-voice",
        ),
        Case(  # prompts that share pages
            path="/v1/audio/speech",
            body={"json": {"input": "Hi.", "voice": "tara"}},
            save=_save_orpheus,
        ),
    ),
    "asr": (
        Case(
            path="/v1/audio/transcriptions",
            body={"files": {"file": ("a.wav", wav(noise(2.0)))}, "data": {}},
            save=write_folder,
        ),
    ),
    "image": (
        Case(
            path="/v1/images/generations",
            body={"json": {"prompt": "x", "steps": 2}},
            save=_save_image,
            adapters=AdapterOptions(lora_paths=("ink.safetensors",)),
        ),
        Case(  # calibrated
            path="/v1/images/generations",
            body={"json": {"prompt": "x", "steps": 14}},
            name="triptych-images",
        ),
    ),
}


@dataclass(kw_only=True)
class Reads:
    """What the models of one kind read: their engine, and the API in front of it."""

    engine: set[str] = field(default_factory=set)
    api: set[str] = field(default_factory=set)


def _place(case: Case, folder: Path) -> str:
    if case.save is None:
        return case.name
    model = folder / "model"
    model.mkdir()
    case.save(model)
    return str(model)


async def _ask(role: Role, case: Case, folder: Path, reads: Reads) -> None:
    """Load the model, ask it, and note what was read on the way."""
    paths = tuple(str(folder / name) for name in case.adapters.lora_paths)
    config = Config(
        models=ModelOptions(model=(_place(case, folder),), served_model_name=(NAME,)),
        device=DeviceOptions(threads=1),
        adapters=AdapterOptions(lora_paths=paths),
        server=ServerOptions(api_key=("key",), log_requests=True),
    )
    models = resolve_models(Resolved.of(config), SilentProgress())
    assert [role_of(model) for model in models] == [role]
    (own, engine_reads), (front, api_reads) = watched(config), watched(config)
    client = LocalClient(build_engine(own, models))
    try:
        await client.load(NAME)
        body = {
            key: {**value, "model": NAME} if key != "files" else value
            for key, value in case.body.items()
        }
        app = build_app(front, models, client)
        async with in_process(app, authorization="Bearer key") as http:
            response = await http.post(case.path, timeout=120, **body)
        await app.state.close()
    finally:
        await client.close()
    assert response.status_code == 200, response.text
    reads.engine |= engine_reads
    reads.api |= api_reads


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Role, Reads]:
    found: dict[Role, Reads] = {role: Reads() for role in ROLES}
    for role, cases in CASES.items():
        for case in cases:
            asyncio.run(_ask(role, case, tmp_path_factory.mktemp(role), found[role]))
    return found


def test_an_option_is_read_by_each_of_its_roles(reads: Mapping[Role, Reads]) -> None:
    unread = {
        (name, role)
        for name, option in declared().items()
        for role in option.roles
        if name not in reads[role].engine | reads[role].api
    }
    assert not unread


def test_an_option_is_read_by_its_roles_alone(reads: Mapping[Role, Reads]) -> None:
    """The API is made for every kind of model, whichever there are; an engine for its own."""
    strange = {
        (name, role)
        for role in ROLES
        for name in reads[role].engine
        if not declared()[name].is_for((role,))
    }
    assert not strange


def test_every_other_option_has_a_reader(
    reads: Mapping[Role, Reads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = set[str]().union(*(part.engine | part.api for part in reads.values()))
    silent = SimpleNamespace(json=SimpleNamespace(encode=lambda setup: b"{}"), structs=structs)
    monkeypatch.setattr(serve, "msgspec", silent)  # what is sent to children is not read yet
    every |= _resolving(tmp_path) | _serving(_place(CASES["chat"][0], tmp_path))
    every |= _encrypting(tmp_path) | _pulling()
    unread = declared().keys() - every
    assert not unread


def _resolving(folder: Path) -> set[str]:
    options = ModelOptions(model=("nobody/nothing",), cache_dir=str(folder), offline=True)
    config, seen = watched(Config(models=options))
    with pytest.raises(SetupError):
        resolve_all(config.models, SilentProgress())
    return seen


def _encrypting(folder: Path) -> set[str]:
    """What HTTPS reads, with certificates of clients."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    both = folder / "both.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(both)
    options = ServerOptions(
        ssl_certfile=str(both),
        ssl_keyfile=str(both),
        ssl_ca_certs=str(folder / "ca.pem"),
        ssl_cert_reqs=1,
    )
    config, seen = watched(Config(server=options))
    assert tls_context(config.server) is not None
    return seen


def _pulling() -> set[str]:
    """What a request to serve a folder reads."""
    config, seen = watched(Config(server=ServerOptions(pull_folder=("/",))))
    check_may_pull("/none", (), config.server)
    return seen


def _serving(place: str) -> set[str]:
    """What a start reads: the plan, and the supervisor, whose children leave at once."""
    leave = (sys.executable, "-c", "raise SystemExit(3)")
    options = Config(models=ModelOptions(model=(place,)), server=ServerOptions(port=0))
    config, seen = watched(options)
    ReplicaPlan.of(config)
    with pytest.raises(SetupError, match="3 crashes"):
        serve.serve(
            Resolved(config, Resolved.of(options).sources),
            serve.Programs(engine=leave, api=leave),
        )
    return seen

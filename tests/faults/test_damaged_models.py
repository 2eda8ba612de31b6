"""Every file of a model, damaged in every way: one line that names it, and never a hang."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.serve_process import Server
from support.text_models import CHATML, write_text_folder
from support.weight_files import write_gguf
from triptych.core.errors import SetupError, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel, open_resolved, resolve
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.modalities.registry import known_sources, role_of

FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
WRONG = {
    "architectures": 5,
    "chat_template": 5,
    "eos_token_id": "x",
    "hidden_size": -1,
    "max_position_embeddings": "far",
    "model": 5,
    "temperature": "hot",
    "vocab_size": "x",
    "weight_map": 7,
}
Damage = Callable[[Path], object]


def _cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def _writing(data: bytes) -> Damage:
    return lambda file: file.write_bytes(data)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _socket(file: Path) -> None:
    file.unlink()
    before = Path.cwd()
    os.chdir(file.parent)  # a socket's path may be but 100 characters long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(before)


DAMAGES: dict[str, Damage] = {
    "empty": _writing(b""),
    "object": _writing(b"{}"),
    "list": _writing(b"[]"),
    "null": _writing(b"null"),
    "binary": _writing(bytes(range(256)) * 4),
    "deep": _writing(b"[" * 20_000),
    "wrong": _writing(json.dumps(WRONG).encode()),
    "cut": _cut,
    "fifo": _fifo,
    "folder": _folder,
    "socket": _socket,
}
HARMLESS = {
    *(("chat_template.jinja", how) for how in ("empty", "object", "list", "null", "deep", "wrong")),
    ("generation_config.json", "object"),
    ("tokenizer_config.json", "object"),
    ("tokenizer_config.json", "wrong"),
}
"""What is no damage: any text is a template, and no field of these files must be there."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="90kB")
    write_text_folder(folder, **json.loads((folder / "config.json").read_text()))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.5}')
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        (*FILES, "model-00002-of-00002.safetensors")
    )
    return folder


def start(place: str) -> ResolvedModel:
    """What the supervisor, the API process and the engine process do with a model."""
    options = ModelOptions()
    model = resolve(
        place, name=None, options=options, progress=SilentProgress(), sources=known_sources()
    )
    role_of(model)
    open_resolved(model, TextModel.open, options)
    open_resolved(model, EmbeddingModel.open, options).reader()
    loader = LlmLoader(model, Config(), Device.open("cpu"), Ledger(2**30))
    loader.load(lambda progress: None).close()
    return model


def test_what_is_not_damaged_starts(whole: Path) -> None:
    start(str(whole))


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_in_one_line(
    whole: Path, tmp_path: Path, name: str, how: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    DAMAGES[how](folder / name)
    if (name, how) in HARMLESS:
        start(str(folder))
        return
    with pytest.raises(SetupError) as caught:
        start(str(folder))
    assert name in caught.value.message
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


EXTREMES = (0, -1, 2**24, 2**31, 2**70)
NOT_READ = {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"}


def config_of(family: str) -> dict[str, Any]:
    """What a folder of text has, and what the family adds; the weights are those of a Llama."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, num_hidden_layers=2)
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {**fields, "architectures": [f"{family}ForCausalLM"], "vocab_size": 259}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("family", ["Llama", "Mixtral", "Qwen3Moe", "GPT2", "Phi"])
def test_no_extreme_of_a_configuration_hangs_or_ends_in_more_than_a_line(
    whole: Path, tmp_path: Path, family: str, value: int
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    config = config_of(family)
    for field, own in config.items():
        if type(own) is not int or field in NOT_READ:
            continue
        (folder / "config.json").write_text(json.dumps(config | {field: value}))
        line = ""
        try:
            start(str(folder))
        except SetupError as error:
            line = error.message
        assert "\n" not in line, field
        assert line or family == "Llama", field


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "num_local_experts", "vocab_size", "hidden_size"]
)
def test_a_field_that_the_weights_cannot_have_is_named_with_its_value(
    whole: Path, tmp_path: Path, field: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    config = config_of("Mixtral") | {field: 2**24}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match=rf"config\.json: {field} is {2**24}"):
        start(str(folder))


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "folder"])
def test_a_damaged_gguf_file_is_named_in_one_line(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf")
    DAMAGES[how](file)
    with pytest.raises(SetupError, match=r"tiny\.gguf"):
        start(str(file))


def test_whatever_a_reader_raises_names_the_model() -> None:
    model = ResolvedModel(name="tiny", reference="tiny", folder="/nowhere", digest="00")

    def read(model: ResolvedModel) -> None:
        raise KeyError("a\nfield")

    with pytest.raises(WeightsError, match=r"tiny cannot be read.*KeyError") as caught:
        open_resolved(model, read)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("how", ["object", "cut", "fifo"])
def test_a_server_does_not_try_a_damaged_tokenizer_twice(
    whole: Path, tmp_path: Path, how: str
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    DAMAGES[how](folder / "tokenizer.json")
    with Server("--model", str(folder), log=tmp_path / "log") as server:
        assert server.wait_exit(120) == 2
        lines = server.output.splitlines()
    assert lines[-1].startswith("error: ")
    assert "tokenizer.json" in lines[-1]
    assert not any("Traceback" in line or "restarting it" in line for line in lines)

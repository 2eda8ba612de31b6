"""What a chat pipeline leaves behind: nothing, however it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import transformers

from support.child_processes import renderers_from_now
from support.http import until
from support.text_models import write_text_folder
from triptych import ChatPipeline
from triptych.core.errors import DeviceError, EngineDown
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.local import LocalClient

Started = Callable[[], list[psutil.Process]]


@pytest.fixture
def started() -> Started:
    return renderers_from_now()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = tmp_path / "model"
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    write_text_folder(made, **json.loads((made / "config.json").read_text()))
    return str(made)


def open_chat(folder: str) -> ChatPipeline:
    return ChatPipeline.from_pretrained(folder, progress=False, kv_cache_memory_mb=16)


def test_closing_ends_the_chat_template(folder: str, started: Started) -> None:
    with open_chat(folder) as chat:
        assert chat("hi", max_tokens=1).usage.num_output_tokens == 1
        assert started()
    chat.close()
    assert not started()


def test_a_model_that_does_not_load_leaves_no_chat_template(
    folder: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(client: LocalClient, model: str) -> None:
        until(lambda: bool(started()))
        raise EngineDown("Gone.")

    monkeypatch.setattr(LocalClient, "load", load)
    with pytest.raises(EngineDown):
        open_chat(folder)
    assert not started()


def test_without_a_device_no_chat_template_is_started(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_device(*args: object) -> None:
        raise DeviceError("There is none.")

    monkeypatch.setattr("triptych.core.runtime.devices.device.open_device", open_device)
    monkeypatch.setattr(TextModel, "start", lambda text: pytest.fail("started"))
    with pytest.raises(DeviceError):
        open_chat(folder)

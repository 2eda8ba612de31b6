"""Images and questions in this process: the whole engine, a tiny model, Python and `see`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from support.child_processes import preparers
from support.images import image, saved
from support.text_models import write_text_folder
from support.vision_folders import write_vision_folder
from triptych.cli import COMMANDS
from triptych.core.errors import ConfigError, InvalidRequest
from triptych.modalities.vlm.api import cli, pipeline
from triptych.modalities.vlm.api.pipeline import VisionPipeline, image_source
from triptych.modalities.vlm.processing.probe import read_facts

OPTIONS: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eyes")
    write_vision_folder(folder)
    (folder / "a.png").write_bytes(saved(image()))
    return folder


@pytest.fixture(scope="module")
def see(folder: Path) -> Iterator[VisionPipeline]:
    with VisionPipeline.from_pretrained(str(folder), progress=False) as opened:
        yield opened


def test_an_image_is_the_same_in_every_form(see: VisionPipeline, folder: Path) -> None:
    path = folder / "a.png"
    forms = [path, str(path), path.read_bytes(), Image.open(path)]
    answers = {see(form, "What?", **OPTIONS).text for form in forms}
    assert len(answers) == 1
    streamed = "".join(see.stream(path, "What?", **OPTIONS))
    assert answers == {streamed}


def test_a_conversation_goes_on(see: VisionPipeline) -> None:
    shown = {"type": "image", "image": Image.new("RGB", (40, 40), "green")}
    first = [{"role": "user", "content": [shown, {"type": "text", "text": "x" * 40}]}]
    asked = see(first, **OPTIONS)
    assert (asked.usage.num_image_tokens, asked.usage.num_cached_images) == (16, 0)
    more = [*first, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    usage = see(more, **OPTIONS).usage
    assert (usage.num_image_tokens, usage.num_cached_images) == (16, 1)
    assert usage.num_cached_tokens >= 32


def test_another_image_is_another_prompt(see: VisionPipeline) -> None:
    question = "y" * 64
    for colour in ("red", "blue"):
        usage = see(Image.new("RGB", (40, 40), colour), question, **OPTIONS).usage
        assert usage.num_cached_tokens == 0


def test_what_is_no_image(see: VisionPipeline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.png cannot be read"):
        see(tmp_path / "gone.png", "What?")
    with pytest.raises(InvalidRequest, match="PIL image"):
        image_source(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="fetches nothing"):
        see("http://example.com/a.png", "What?")


def test_the_child_of_a_processor_ends_with_the_pipeline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that needs torch runs in a child process."""
    monkeypatch.setattr(pipeline, "needs_torch", lambda folder: True)
    monkeypatch.setattr(pipeline, "probe_facts", lambda folders: [read_facts(folders[0])])
    others = preparers()
    with VisionPipeline.from_pretrained(str(folder), progress=False) as see:
        assert see(folder / "a.png", "What?", **OPTIONS).samples
        assert len(preparers()) == len(others) + 1
    assert len(preparers()) == len(others)


def test_a_model_that_reads_text_alone_is_refused(tmp_path: Path) -> None:
    write_text_folder(tmp_path, model_type="llama")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no vision encoder"):
        VisionPipeline.from_pretrained(str(tmp_path), progress=False)


def run(name: str, *argv: str) -> int:
    (command,) = (command for command in COMMANDS if command.name == name)
    return command.run(argv)


@pytest.fixture
def opened(see: VisionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(VisionPipeline):
        def close(self) -> None: ...

    def keep(args: argparse.Namespace) -> VisionPipeline:
        return Kept(see._model, see._host)

    monkeypatch.setattr(cli, "_open_pipeline", keep)
    monkeypatch.setattr(cli, "_open_chat", keep)


@pytest.mark.usefixtures("opened")
def test_see(folder: Path, see: VisionPipeline, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "a.png")
    few = ("--max-tokens", "4", "--temperature", "0")
    assert run("see", path, path, "What", "differs?", *few) == 0
    assert capsys.readouterr().out == see([path, path], "What differs?", **OPTIONS).text + "\n"
    assert run("chat", "--image", path, "What?", *few) == 0
    assert capsys.readouterr().out == see(path, "What?", **OPTIONS).text + "\n"


@pytest.mark.usefixtures("opened")
def test_see_what_is_piped_in(
    folder: Path,
    see: VisionPipeline,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = (folder / "a.png").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run("see", "--max-tokens", "4", "--temperature", "0") == 0
    answer = see(data, "What is in this picture?", **OPTIONS).text
    assert capsys.readouterr().out == answer + "\n"


def test_see_needs_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match="name a file"):
        run("see", "What is this?")


def test_see_reads_its_images_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "_open_pipeline", lambda args: pytest.fail("a model is loaded"))
    with pytest.raises(ConfigError, match=r"missing\.png cannot be read"):
        run("see", "missing.png", "What is this?")

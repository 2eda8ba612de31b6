"""`triptych imagine --batch`: lines in, files and `results.jsonl` out."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.image_engine import COLOURS, PlainEngine, open_plain
from triptych.core.errors import ConfigError, NonFinite
from triptych.core.options.table import parse
from triptych.modalities.diffusion.api import cli
from triptych.modalities.diffusion.wire import AdapterUse

Generate = Callable[..., int]


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine()


@pytest.fixture
def generate(engine: PlainEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generate:
    def run(lines: list[Any], *argv: str) -> int:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "lines.jsonl").write_text("\n".join(texts))
        parser = argparse.ArgumentParser(prog="triptych imagine", allow_abbrev=False)
        cli.add_imagine_arguments(parser)
        given = ["--batch", str(tmp_path / "lines.jsonl"), "-o", str(tmp_path / "out"), *argv]
        return cli.run_imagine(parse(parser, given))

    monkeypatch.setattr(cli, "_open_pipeline", lambda args: open_plain(engine))
    return run


def results(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out" / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir() if path.suffix != ".jsonl")


def test_every_batch_line_has_a_result(
    generate: Generate, engine: PlainEngine, tmp_path: Path
) -> None:
    fields = {"prompt": "a fox", "n": 2, "seed": 5, "size": "64x32", "steps": 4, "id": "mine"}
    assert generate(["a hen", "", '"a \\"cat\\""', {**fields, "output_format": "jpeg"}]) == 0
    assert [asked.prompt for asked in engine.submitted.values()] == ["a hen", 'a "cat"', "a fox"]
    assert names(tmp_path) == ["00001-1.png", "00003-1.png", "00004-1.jpeg", "00004-2.jpeg"]
    last = results(tmp_path)[-1]
    assert (last["line"], last["seed"], last["steps"], last["computed"]) == (4, 5, 4, [2, 2])
    assert (last["files"], last["request"]["id"]) == (names(tmp_path)[2:], "mine")
    keys = {"line", "model", "request", "files", "seed", "steps", "computed", "elapsed_s", "row"}
    assert set(last) == keys
    with Image.open(tmp_path / "out" / "00001-1.png") as image:
        assert image.getpixel((5, 5)) == COLOURS[0]
    with Image.open(tmp_path / "out" / "00004-2.jpeg") as image:
        assert (image.format, image.size) == ("JPEG", (64, 32))


def test_all_lines_are_asked_for_at_once(
    generate: Generate, engine: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = engine.act

    async def note(job_id: str, request: Any) -> None:
        await original(job_id, request)
        seen.append(len(engine.running))

    monkeypatch.setattr(engine, "act", note)
    assert generate([f"hen {index}" for index in range(20)]) == 0
    assert seen[0] == 19
    assert len(engine.submitted) == 20


def test_options_of_the_command_are_for_lines_that_say_nothing_else(
    generate: Generate, engine: PlainEngine
) -> None:
    words = "--steps 9 --guidance 3.5 --negative dark --adapter ink=0.5 --num-computed 3"
    generate(["a hen", {"prompt": "a fox", "num_inference_steps": 4}], *words.split())
    hen, fox = engine.submitted.values()
    assert (hen.num_steps, hen.guidance_scale, hen.negative_prompt) == (9, 3.5, "dark")
    assert (hen.adapters, hen.cache.num_computed) == ((AdapterUse("ink", 0.5),), 3)
    assert (fox.num_steps, fox.guidance_scale) == (4, 3.5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": ', "not valid JSON"),
        ({"prompt": "a fox", "colour": "red"}, "colour"),
        ({"prompt": "a fox", "size": "63x64"}, "64x64"),
        ({"prompt": "a fox", "steps": 0}, "steps"),
        ({"prompt": "a fox", "image": "a.png"}, "image"),
        ({"prompt": "a fox", "stream": True}, "stream"),
        ({"prompt": ""}, "prompt"),
        ({"steps": 3}, "prompt"),
    ],
)
def test_a_bad_line_harms_no_other(
    generate: Generate, tmp_path: Path, capfd: pytest.CaptureFixture[str], bad: Any, message: str
) -> None:
    assert generate(["a hen", bad, "a cat"]) == 1
    assert names(tmp_path) == ["00001-1.png", "00003-1.png"]
    error = results(tmp_path)[1]["error"]
    assert message in error["message"]
    assert f"row 2: {error['message']}" in capfd.readouterr().err.replace("\n", " ")


def test_a_second_run_generates_what_is_left(
    generate: Generate, engine: PlainEngine, tmp_path: Path
) -> None:
    lines = ["a hen", "a cat", "a fox", "a dog"]
    assert generate(lines) == 0
    before = results(tmp_path)
    cut = tmp_path / "out" / "00002-1.png"
    cut.write_bytes(cut.read_bytes()[:60])
    (tmp_path / "out" / "00003-1.png").unlink()
    engine.submitted.clear()
    assert generate([*lines[:3], "a wolf", "an owl"]) == 0
    prompts = [asked.prompt for asked in engine.submitted.values()]
    assert prompts == ["a cat", "a fox", "a wolf", "an owl"]
    assert results(tmp_path)[0] == before[0]
    assert [record["line"] for record in results(tmp_path)] == [1, 2, 3, 4, 5]
    engine.submitted.clear()
    assert generate([*lines[:3], "a wolf", "an owl"]) == 0
    assert not engine.submitted


def test_what_an_aborted_run_has_generated_is_kept(
    generate: Generate, engine: PlainEngine, tmp_path: Path
) -> None:
    assert generate(["a hen", "a cat"]) == 0
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(path.read_text()[:-20])
    engine.submitted.clear()
    assert generate(["a hen", "a cat"]) == 0
    assert [asked.prompt for asked in engine.submitted.values()] == ["a cat"]


def test_engine_errors_are_reported_per_line(
    generate: Generate, engine: PlainEngine, tmp_path: Path
) -> None:
    engine.error = NonFinite("NaN.")
    assert generate(["a hen", "a cat"]) == 1
    assert [record["error"]["code"] for record in results(tmp_path)] == ["non_finite"] * 2


@pytest.mark.parametrize("lines", [[], ["", " "]])
def test_lines_are_needed(generate: Generate, lines: list[str]) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        generate(lines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a hen"], "leave out prompt"),
        (["--strength", "0.5"], "leave out strength"),
        (["-o", __file__], "writes into a folder"),
        (["-o", "/no/such/folder"], "cannot be written"),
        (["--batch", "/no/such/file"], "cannot be read"),
        (["--adapter", "ink=much"], "ink=0.8"),
    ],
)
def test_wrong_use_says_what_to_do(generate: Generate, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(["a hen"], *argv)


def test_lines_may_be_piped_in(
    generate: Generate, engine: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a hen\na cat\n"))
    assert generate([], "--batch", "-") == 0
    assert len(engine.submitted) == 2

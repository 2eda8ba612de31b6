"""Commands with `--server`: the output is that of a model in this process."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.full_app import FullApp, open_full_app
from support.http import live
from support.images import image, saved
from support.voices_app import recording
from triptych.cli import main

Run = Callable[..., int]


@pytest.fixture
def full_app(tmp_path: Path) -> FullApp:
    return open_full_app(tmp_path / "app")


@pytest.fixture
def run(full_app: FullApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command that uses the server."""
    monkeypatch.chdir(tmp_path)
    with live(full_app.app) as server:
        yield lambda *argv: main([*argv, "--server", server.url])


@pytest.fixture
def output(run: Run, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command, and return the text on stdout."""

    def get(*argv: str) -> str:
        capsys.readouterr()
        assert run(*argv) == 0
        return capsys.readouterr().out

    return get


def test_chat(output: Callable[..., str]) -> None:
    assert output("chat", "hello", "there") == "hi\n"
    assert output("chat", "hello", "--model", "tiny", "--max-tokens", "9") == "hi\n"
    assert output("run", "tiny", "hello") == "hi\n"


def test_generate(output: Callable[..., str], tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 1}, {"messages": [{"role": "user", "content": "b"}], "n": 2}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [json.loads(line) for line in output("generate", "c", "-i", "in.jsonl").splitlines()]
    assert [line["text"] for line in found] == ["hi"] * 3
    assert (found[1]["id"], found[2]["texts"]) == (1, ["hi", "ih"])
    assert {"finish_reason", "prompt_tokens", "completion_tokens"} < found[0].keys()


def test_a_bad_row_is_an_error_row(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text('{"prompt": 5}\n{"prompt": "a", "model": "other"}\n{"prompt": "a"}')
    assert run("generate", "-i", "in.jsonl") == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    codes = [line.get("error", {}).get("code") for line in found]
    assert codes == ["invalid_request", "model_not_found", None]


@pytest.mark.parametrize("count", [1, 2])
def test_imagine(run: Run, tmp_path: Path, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("imagine", "a hen", "-o", "a.png", "-n", str(count), "--steps", "3") == 0
    names = ["a.png"] if count == 1 else ["a-1.png", "a-2.png"]
    lines = capfd.readouterr().err.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == names
    assert all("3 steps" in line for line in lines)
    for name in names:
        with Image.open(tmp_path / name) as found:
            assert found.format == "PNG"


def test_imagine_from_an_image(run: Run, full_app: FullApp, tmp_path: Path) -> None:
    (tmp_path / "b.jpg").write_bytes(saved(image(64, 64), "jpeg"))
    assert run("imagine", "a hen", "-i", "b.jpg", "--strength", "0.5", "-o", "c.webp") == 0
    request = list(full_app.image.submitted.values())[-1]
    assert (len(request.sources), request.strength) == (1, 0.5)
    assert run("imagine", "-i", "b.jpg", "-o", "c.webp") == 2  # a variation


def test_the_seed_of_a_command_is_that_of_its_requests(run: Run, full_app: FullApp) -> None:
    assert run("imagine", "a hen", "-o", "a.png", "--seed", "7") == 0
    assert list(full_app.image.submitted.values())[-1].seed == 7
    assert run("chat", "hello", "--seed", "8") == 0
    assert list(full_app.chat.submitted.values())[-1].sampling.seed == 8
    assert run("chat", "hello", "--seed", "8", "--request-seed", "9") == 0
    assert list(full_app.chat.submitted.values())[-1].sampling.seed == 9
    assert run("embed", "a", "--seed", "8") == 2


def test_imagine_a_batch(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('a hen\n{"prompt": "a cat", "output_format": "webp"}\n')
    assert run("imagine", "--batch", "lines", "-o", "out") == 0
    records = list(map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines()))
    assert [record["files"] for record in records] == [["00001-1.png"], ["00002-1.webp"]]
    assert all(record["computed"] for record in records)


@pytest.mark.parametrize("name", ["a.wav", "a.mp3"])
def test_speak(run: Run, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("speak", "Hello there.", "-o", name) == 0
    assert "s of speech" in capfd.readouterr().err
    if name == "a.wav":
        with wave.open(str(tmp_path / name)) as reader:
            assert reader.getframerate() == 24_000
            assert reader.getnframes() > 10_000
            assert any(reader.readframes(-1))


FORMS = [
    ((), "Hello.\n"),
    (("--format", "srt"), "1\n00:00:00,000 --> 00:00:01,000\nHello.\n\n"),
    (("--format", "json"), '{"text":"Hello.",'),
    (("--format", "verbose_json", "--words"), '{"task":"transcribe"'),
    (("--translate",), "Hello.\n"),
]


@pytest.mark.parametrize(("argv", "begin"), FORMS)
def test_transcribe(
    output: Callable[..., str], tmp_path: Path, argv: Sequence[str], begin: str
) -> None:
    (tmp_path / "a.wav").write_bytes(recording())
    found = output("transcribe", "a.wav", *argv)
    assert found.startswith(begin)
    assert found.endswith("\n")
    assert ('"words":' in found) == ("--words" in argv)


def test_transcribe_goes_on_after_a_bad_file(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.wav").write_bytes(recording())
    assert run("transcribe", "gone.wav", "a.wav") == 1
    captured = capsys.readouterr()
    assert (captured.out, "gone.wav" in captured.err) == ("Hello.\n", True)
    assert run("transcribe", "a.wav", "--translate", "--language", "de") == 2
    assert run("transcribe", ".", "-o", "texts") == 2


def test_embed(output: Callable[..., str], tmp_path: Path) -> None:
    found = [json.loads(line) for line in output("embed", "w1", "w2 w3").splitlines()]
    assert [len(line["embedding"]) for line in found] == [8, 8]
    output("embed", "w1", "w2", "-o", "v.npy", "--dimensions", "4", "--cut")
    assert np.load(tmp_path / "v.npy").shape == (2, 4)
    assert output("embed", "w1", "--similar-to", "w2") == " 1.000  w1\n"


def test_voices(run: Run, output: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "ada.wav").write_bytes(recording())
    made = output("voices", "add", "Ada", "--audio", "ada.wav", "--consent", "Yes.", "--json")
    card = json.loads(made)
    assert card["name"] == "Ada"
    listed = json.loads(output("voices", "--json"))
    assert listed[-1] == card
    assert card["id"] in output("voices")
    assert output("voices", "delete", card["id"]) == f"{card['id']} is deleted\n"
    assert run("voices", "delete", card["id"]) == 2

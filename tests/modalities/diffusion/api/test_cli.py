"""`triptych imagine`: what it reads, writes and shows."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from support.image_engine import COLOURS, MODEL, PlainEngine, open_plain
from support.images import image, saved
from triptych.core.errors import ConfigError, NonFinite, RequestError
from triptych.core.options.table import declared, parse
from triptych.modalities.diffusion.api import cli
from triptych.modalities.diffusion.api.image_model import ImageModel
from triptych.modalities.diffusion.api.results import GeneratedImage
from triptych.modalities.diffusion.arguments import UNUSED
from triptych.modalities.diffusion.wire import AdapterUse, ImageRequest, StepCache
from triptych.modalities.host import EngineHost

Imagine = Callable[..., int]


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine()


@pytest.fixture
def imagine(
    engine: PlainEngine,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],  # takes the bytes of images on stdout
) -> Imagine:
    monkeypatch.setattr(cli, "_open_pipeline", lambda args, check=None: open_plain(engine))
    return _run


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="triptych imagine", allow_abbrev=False)
    cli.add_imagine_arguments(parser)
    return cli.run_imagine(parse(parser, argv))


def asked(engine: PlainEngine) -> ImageRequest:
    return list(engine.submitted.values())[-1]


@pytest.mark.parametrize(
    ("name", "kind"), [("a.png", "PNG"), ("a.jpg", "JPEG"), ("a.webp", "WEBP")]
)
def test_a_file_has_the_format_of_its_name(
    imagine: Imagine,
    engine: PlainEngine,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    name: str,
    kind: str,
) -> None:
    assert imagine("a", "red", "apple", "-o", str(tmp_path / name)) == 0
    with Image.open(tmp_path / name) as image:
        assert (image.format, image.size) == (kind, (64, 64))
    assert asked(engine).prompt == "a red apple"
    err = capfdbinary.readouterr().err.decode().replace("\n", "")
    assert f"{name}: 64x64, seed {asked(engine).seed}, 6 steps (3 computed)" in err


def test_several_images_are_numbered(imagine: Imagine, tmp_path: Path) -> None:
    assert imagine("a hen", "-n", "3", "-o", str(tmp_path / "hen.png")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hen-1.png",
        "hen-2.png",
        "hen-3.png",
    ]
    for index, colour in enumerate(COLOURS, start=1):
        with Image.open(tmp_path / f"hen-{index}.png") as image:
            assert image.getpixel((5, 5)) == colour


def test_layers_are_files_of_their_own(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        output=str(tmp_path / "a.png"), quality=None, format=None, num_images=1, layers=2
    )
    layers = tuple(Image.new("RGBA", (4, 4), colour) for colour in ("red", "blue"))
    made = GeneratedImage(
        image=layers[1], index=0, seed=1, num_steps=1, num_computed=1, elapsed_s=0, layers=layers
    )
    cli._Sink.of(arguments).take(made)
    names = ["a-layer-1.png", "a-layer-2.png", "a.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with Image.open(tmp_path / "a-layer-1.png") as lowest:
        assert (lowest.mode, lowest.getpixel((0, 0))) == ("RGBA", (255, 0, 0, 255))


@pytest.mark.parametrize("output", [[], ["-o", "-"]])
def test_a_pipe_gets_the_image(
    imagine: Imagine, capfdbinary: pytest.CaptureFixture[bytes], output: list[str]
) -> None:
    assert imagine("a hen", *output, "--format", "webp") == 0
    with Image.open(io.BytesIO(capfdbinary.readouterr().out)) as image:
        assert image.format == "WEBP"


def test_options_reach_the_engine(imagine: Imagine, engine: PlainEngine, tmp_path: Path) -> None:
    words = "--size 64x32 --steps 9 --guidance 3.5 --negative dark --sampler heun"
    words += " --num-computed 5 --adapter ink=0.5 --adapter gold"
    assert imagine("a hen", "-o", str(tmp_path / "a.png"), *words.split()) == 0
    request = asked(engine)
    assert (request.width, request.height, request.num_steps) == (64, 32, 9)
    assert (request.guidance_scale, request.negative_prompt) == (3.5, "dark")
    assert (request.sampler, request.cache) == ("heun", StepCache(num_computed=5))
    assert request.adapters == (AdapterUse("ink", 0.5), AdapterUse("gold", 1.0))


def test_the_quality_of_a_file_can_be_chosen(imagine: Imagine, tmp_path: Path) -> None:
    sizes = []
    for quality in ("5", "100"):
        path = tmp_path / "a.jpg"
        imagine("a hen", "-o", str(path), "--quality", quality, "-i", _saved(tmp_path))
        sizes.append(path.stat().st_size)
    assert sizes[0] < sizes[1]


def _saved(folder: Path, width: int = 64) -> str:
    path = folder / "source.png"
    path.write_bytes(saved(image(width, width)))
    return str(path)


def test_images_are_begun_from(imagine: Imagine, engine: PlainEngine, tmp_path: Path) -> None:
    mask = tmp_path / "mask.png"
    mask.write_bytes(saved(Image.new("L", (64, 64), 255)))
    source, out = _saved(tmp_path), str(tmp_path / "out.png")
    imagine("a hen", "-i", source, "--mask", str(mask), "--strength", "0.5", "-o", out)
    request = asked(engine)
    assert (len(request.sources), request.strength) == (1, 0.5)
    assert request.mask == b"\xff" * 64 * 64
    imagine("-i", source, "-o", out)
    assert asked(engine).prompt == ""


@pytest.mark.parametrize("argv", [[], ["-"]])
def test_the_prompt_may_be_piped_in(
    imagine: Imagine,
    engine: PlainEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a fox\n"))
    assert imagine(*argv, "-o", str(tmp_path / "a.png")) == 0
    assert asked(engine).prompt == "a fox"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-o", "a.txt"], r"use \.png"),
        (["-o", "/no/such/folder/a.png"], "the folder folder does not exist"),
        (["-o", "."], "is a folder: name a file"),
        (["-n", "2"], r"-o image\.png"),
        (["-o", "a.png", "--size", "64"], "write WIDTHxHEIGHT"),
        (["-o", "a.png", "--quality", "50"], "PNG is lossless"),
        (["-o", "a.jpg", "--quality", "101"], "must be 0 to 100"),
        (["-o", "a.png", "--adapter", "ink=much"], "ink=0.8"),
        (["-o", "a.png", "-i", "/no/such.png"], "cannot be read"),
        (["-o", "a.png", "--guidence", "3"], "did you mean --guidance"),
    ],
)
def test_wrong_use_says_what_to_type(
    imagine: Imagine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        imagine("a hen", *argv)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_no_bytes(imagine: Imagine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(ConfigError, match=r"-o image\.png"):
        imagine("a hen")
    with pytest.raises(ConfigError, match="The prompt is missing"):
        imagine("-o", "a.png")


@pytest.mark.parametrize("name", sorted(UNUSED))
def test_options_without_effect_are_unknown(imagine: Imagine, name: str) -> None:
    flag = declared()[name].flags[0]
    with pytest.raises(ConfigError, match=f"{flag} is not an option of"):
        imagine("a hen", "-o", "a.png", flag, "1")


@pytest.mark.parametrize("argv", [[""], ["  "], ["-"], []])
def test_empty_prompt_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, imagine: Imagine, argv: list[str]
) -> None:
    monkeypatch.setattr(cli, "_open_pipeline", lambda *args: pytest.fail("it is loaded"))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(ConfigError, match="The prompt is missing"):
        imagine(*argv, "-o", "a.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--size 63x64", "64x64"),
        ("--steps 0", "steps must be between"),
        ("-n 11", "n must be between"),
        ("--guidance 1 --negative dark", "needs guidance above"),
        ("--sampler oiler", "euler, heun"),
        ("--adapter steel --lora-paths ink=ink.safetensors", "adapters: ink"),
        ("--strength 0.5", "strength"),
    ],
)
def test_what_the_model_cannot_do_costs_no_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, message: str
) -> None:
    monkeypatch.setattr(EngineHost, "start", lambda *args: pytest.fail("it is loaded"))
    monkeypatch.setattr(ImageModel, "open", lambda resolved: MODEL)
    with pytest.raises(RequestError, match=message):
        _run("a hen", "-o", str(tmp_path / "a.png"), *words.split())


def test_failures_are_reported_and_leave_no_file(
    imagine: Imagine, engine: PlainEngine, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    engine.error = NonFinite("NaN.")
    with pytest.raises(NonFinite):
        imagine("a hen", "-o", str(path))
    assert not path.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
def test_full_disk_is_reported(imagine: Imagine) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        imagine("a hen", "-o", "/dev/full", "--format", "png")


def _terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    seen = io.StringIO()

    def console(*, stderr: bool) -> Console:
        assert stderr
        return Console(file=seen, force_terminal=True, width=80, color_system="truecolor")

    monkeypatch.setattr(cli, "Console", console)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("TERM_PROGRAM", "KITTY_WINDOW_ID", "LC_TERMINAL", "TMUX", "STY"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_a_terminal_watches_the_image_and_the_steps(
    imagine: Imagine, engine: PlainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _terminal(monkeypatch)
    assert imagine("a hen", "-n", "2", "-o", str(tmp_path / "a.png")) == 0
    assert asked(engine).num_partials == 3
    text = seen.getvalue()
    red = ";".join(map(str, COLOURS[0]))
    assert f"38;2;{red};48;2;{red}m▀" in text
    assert "12/12 steps, 6 computed" in text
    assert "a-2.png" in text


def test_a_preview_can_be_left_out(
    imagine: Imagine, engine: PlainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _terminal(monkeypatch)
    assert imagine("a hen", "--no-preview", "-o", str(tmp_path / "a.png")) == 0
    assert asked(engine).num_partials == 0
    assert "▀" not in seen.getvalue()
    assert "6/6 steps" in seen.getvalue()

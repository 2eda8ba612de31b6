"""`triptych calibrate` on a tiny model: the file that it writes, and the book that reads it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.image_folders import save_pipeline
from support.kernel_levels import cache_with_kernels
from triptych.core.errors import ConfigError, InvalidRequest, WeightsError
from triptych.core.options.config import Config, ModelOptions
from triptych.core.options.table import parse
from triptych.modalities.diffusion.engine.caches.choice import CacheResolver
from triptych.modalities.diffusion.engine.caches.decisions import PlanGate
from triptych.modalities.diffusion.engine.calibration import cli as calibrate_cli
from triptych.modalities.diffusion.engine.calibration.file import (
    cached_path,
    model_digest,
    read_calibration,
)
from triptych.modalities.diffusion.wire import StepCache

CLASS = "SD3Transformer2DModel"
Calibrate = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_pipeline(folder, "StableDiffusion3Pipeline")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(models=ModelOptions(cache_dir=str(tmp_path)))


@pytest.fixture
def calibrate(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Calibrate:
    def run(*argv: str, reference: str = str(model)) -> str:
        parser = argparse.ArgumentParser(prog="triptych calibrate", allow_abbrev=False)
        calibrate_cli.add_calibrate_arguments(parser)
        cache = cache_with_kernels(tmp_path)
        common = ["--size", "32x32", "--cache-dir", str(cache), "--device", "cpu"]
        words = [reference, *common, "--threads", "1", *argv]
        assert calibrate_cli.run_calibrate(parse(parser, words)) == 0
        return capsys.readouterr().out

    return run


def open_book(model: Path, config: Config) -> CacheResolver:
    return CacheResolver.open(model, CLASS, can_probe=True, config=config)


def test_plans_are_written_where_the_book_finds_them(
    calibrate: Calibrate, model: Path, config: Config
) -> None:
    assert open_book(model, config).method(StepCache(), 8) is None
    printed = calibrate("--steps", "8", "4", "--num-images", "2")
    for word in ("8 steps, 2 images, 32x32", "4 steps", "4/8", "dB", "x", "is written"):
        assert word in printed
    book = open_book(model, config)
    assert [run.num_steps for run in book.runs] == [4, 8]
    for num_computed in (2, 4):
        method = book.method(StepCache(num_computed=num_computed), 8)
        assert method is not None
        gate = method.open_gate(8)
        assert isinstance(gate, PlanGate)
        assert sum(gate.plan) == num_computed
    assert book.method(StepCache(name="magcache"), 8) is not None
    assert book.method(StepCache(name="teacache"), 8) is not None
    assert book.method(StepCache(), 5) is None


def test_files_grow_and_may_lie_next_to_the_model(
    calibrate: Calibrate, model: Path, config: Config, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    calibrate("--steps", "4", "--num-images", "1", "-o", str(path))
    calibrate("--steps", "5", "--num-images", "1", "-o", str(path), "--sampler", "heun")
    file = read_calibration(path, model_digest(model, ModelOptions()))
    assert file is not None
    assert file.model_class == CLASS
    assert [(run.sampler, run.num_evaluations) for run in file.runs] == [("", 4), ("heun", 9)]
    assert not cached_path(config, file.digest).exists()


def test_prompts_are_read_and_generated_in_turn(
    calibrate: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[Any] = []
    images = calibrate_cli._images

    def listen(*args: Any) -> Any:
        generated.extend(images(*args))
        return generated

    monkeypatch.setattr(calibrate_cli, "_images", listen)
    file = tmp_path / "prompts.txt"
    file.write_text("a fox\n\n  a hen \n")
    calibrate("--steps", "3", "--num-images", "3", "--prompts", str(file))
    assert [(image.prompt, image.seed) for image in generated] == [
        ("a fox", 0),
        ("a hen", 1),
        ("a fox", 2),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "1 to 1000"),
        (["--num-images", "0"], "--num-images: must be at least 1"),
        (["--images-at-once", "0"], "--images-at-once"),
        (["--prompts", "/no/such/file"], "cannot be read"),
        (["--prompts", "/dev/null"], "is empty"),
        (["--model", "other=./folder"], "name one"),
        (["--step", "4"], "did you mean --steps"),
    ],
)
def test_wrong_use_says_what_to_type(
    calibrate: Calibrate, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.setattr(calibrate_cli, "resolve_all", lambda options, *args, **kw: options.model)
    with pytest.raises(ConfigError, match=message):
        calibrate(*argv)


def test_what_cannot_be_calibrated_is_refused(calibrate: Calibrate, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--size 32: write WIDTHxHEIGHT"):
        calibrate("--size", "32")
    with pytest.raises(InvalidRequest, match="its samplers are: euler, heun"):
        calibrate("--steps", "4", "--sampler", "ddim")
    with pytest.raises(InvalidRequest, match="None of 2 steps can be skipped"):
        calibrate("--steps", "2", "--num-images", "1")
    with pytest.raises(WeightsError, match="no folder"):
        calibrate(reference=str(tmp_path / "nothing"))

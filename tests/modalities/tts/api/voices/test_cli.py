"""`triptych voices` lists, adds and deletes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from support.voices_app import MYNAH, SINGER, FakeFrontEnd, recording
from triptych.core.errors import ConfigError, InvalidRequest, UnsupportedOption
from triptych.core.http.auth import owners
from triptych.core.options.config import Config, ModelOptions, ServerOptions
from triptych.core.options.table import parse
from triptych.modalities.tts.api.voices import cli
from triptych.modalities.tts.api.voices.store import VoiceStore


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[FakeFrontEnd]:
    """The front ends that the command finds."""
    fronts = [SINGER, MYNAH]
    monkeypatch.setattr(cli, "_front_ends", lambda config: fronts)
    return fronts


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "ada.wav"
    path.write_bytes(recording())
    return path


def voices(folder: Path, *argv: str) -> int:
    parser = argparse.ArgumentParser(prog="triptych voices", allow_abbrev=False)
    cli.add_voices_arguments(parser)
    return cli.run_voices(parse(parser, [*argv, "--cache-dir", str(folder)]))


def added(folder: Path, clip: Path, *argv: str) -> int:
    return voices(folder, "add", "Ada", "--audio", str(clip), "--consent", "She agreed.", *argv)


@pytest.mark.usefixtures("served")
def test_the_voices_of_models_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert voices(tmp_path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["model", "voice", "language", "description"]
    assert lines[1:] == [["singer", "alto", "en-US", "warm"], ["singer", "bass"]]


@pytest.mark.usefixtures("served")
def test_a_voice_is_added_listed_and_deleted(
    tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture
) -> None:
    assert added(tmp_path, clip, "--language", "en-GB", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["name"], made["model"], made["language"]) == ("Ada", "mynah", "en-GB")
    voices(tmp_path, "list", "--json")
    assert json.loads(capsys.readouterr().out)[-1] == made
    voices(tmp_path)
    assert made["id"] in capsys.readouterr().out
    assert voices(tmp_path, "delete", made["id"]) == 0
    capsys.readouterr()
    voices(tmp_path, "--json")
    assert [card["id"] for card in json.loads(capsys.readouterr().out)] == ["alto", "bass"]


@pytest.mark.usefixtures("served")
def test_a_voice_belongs_to_the_key_given(
    tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture
) -> None:
    added(tmp_path, clip, "--api-key", "ada")
    store = VoiceStore.from_config(Config(models=ModelOptions(cache_dir=str(tmp_path))))
    (owner,) = owners(ServerOptions(api_key=("ada",)))
    (record,) = store.voices_of(owner)
    assert store.voices_of("") == []
    with pytest.raises(ConfigError, match="no voice"):
        voices(tmp_path, "delete", record.id)
    capsys.readouterr()
    voices(tmp_path, "--api-key", "bob", "--api-key", "ada", "--json")
    assert json.loads(capsys.readouterr().out)[-1]["id"] == record.id
    voices(tmp_path, "delete", record.id, "--api-key", "ada")
    assert store.voices_of(owner) == []


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["add", "Ada"], "--audio and --consent"),
        (["add", "--audio", "x", "--consent", "y"], "give its name"),
        (["add", "Ada", "--audio", "nowhere.wav", "--consent", "y"], "cannot be read"),
        (["delete"], "Name the voices"),
        (["delete", "../../etc/passwd"], "no voice"),
        (["list", "alto"], "unexpected argument"),
    ],
)
def test_wrong_use_is_one_actionable_line(tmp_path: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        voices(tmp_path, *argv)


@pytest.mark.usefixtures("served")
def test_several_keys_own_no_new_voice(tmp_path: Path, clip: Path) -> None:
    with pytest.raises(ConfigError, match="Several API keys"):
        added(tmp_path, clip, "--api-key", "ada", "--api-key", "bob")


def test_a_bad_recording_or_model_is_refused(
    tmp_path: Path, clip: Path, served: list[FakeFrontEnd]
) -> None:
    clip.write_bytes(recording(0.1))
    with pytest.raises(InvalidRequest, match="at least 1 s"):
        added(tmp_path, clip)
    served.remove(MYNAH)
    with pytest.raises(UnsupportedOption, match="serve one that can"):
        added(tmp_path, clip)

"""`triptych speak`: what it reads, writes and reports."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from support.audio_signals import decode_av
from support.hosts import hosted
from support.speech_app import FakeSpeechEngine, heard, make_speech_service, num_samples
from triptych.core.errors import ConfigError, InvalidRequest, NonFinite
from triptych.core.media.audio.containers import FORMATS
from triptych.modalities.tts.api import cli
from triptych.modalities.tts.api.pipeline import SpeechPipeline

TEXT = "Hello there, this is a sentence. And this is another."
Run = Callable[..., int]


@pytest.fixture
def engine() -> FakeSpeechEngine:
    return FakeSpeechEngine()


@pytest.fixture
def speak(
    engine: FakeSpeechEngine,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],  # takes the bytes of sound on stdout
) -> Run:
    def open_pipeline(args: argparse.Namespace) -> SpeechPipeline:
        service = make_speech_service(engine, max_characters=100_000)
        return SpeechPipeline("hum", hosted(service, "hum"))

    def run(*argv: str) -> int:
        parser = argparse.ArgumentParser()
        cli.add_speak_arguments(parser)
        return cli.run_speak(parser.parse_args(argv))

    monkeypatch.setattr(cli, "_open_pipeline", open_pipeline)
    return run


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_has_the_format_of_its_name_and_knows_its_length(
    speak: Run, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"out.{kind}"
    assert speak(TEXT, "-o", str(path)) == 0
    data, num = path.read_bytes(), num_samples(TEXT)
    if kind == "pcm":
        assert len(data) == 2 * num
        return
    pcm_S, rate = decode_av(data, kind)
    assert 0 <= len(pcm_S) - num * rate // 24_000 <= {"aac": 2048}.get(kind, 0)
    if kind == "wav":
        with wave.open(str(path)) as reader:
            assert reader.getnframes() == num


def test_a_format_can_be_asked_for_by_name(speak: Run, tmp_path: Path) -> None:
    path = tmp_path / "speech"
    assert speak(TEXT, "-o", str(path), "--format", "flac") == 0
    assert path.read_bytes()[:4] == b"fLaC"
    with pytest.raises(ConfigError, match=r"\.mp3, \.opus"):
        speak(TEXT, "-o", str(path))


@pytest.mark.parametrize("output", [[], ["-o", "-"]])
def test_a_pipe_gets_the_stream(
    speak: Run, capfdbinary: pytest.CaptureFixture[bytes], output: list[str]
) -> None:
    assert speak(*TEXT.split(), *output) == 0
    out, err = capfdbinary.readouterr()
    assert out[:4] == b"RIFF"
    assert out[40:44] == b"\xff" * 4
    pcm_S = np.frombuffer(out[44:], "<i2") / 32767
    np.testing.assert_allclose(pcm_S, heard(TEXT), atol=1e-4)
    assert b"2.0 s of speech" in err
    assert b"times real time" in err
    assert b"the first after" in err


def test_a_pipe_with_a_name_gets_the_stream(speak: Run, tmp_path: Path) -> None:
    path = tmp_path / "pipe.wav"
    os.mkfifo(path)
    with ThreadPoolExecutor() as pool:
        piped = pool.submit(path.read_bytes)
        assert speak(TEXT, "-o", str(path)) == 0
    assert len(piped.result()) == 44 + 2 * num_samples(TEXT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
def test_full_disk_is_reported(speak: Run) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        speak(TEXT, "-o", "/dev/full", "--format", "wav")


def test_a_listener_is_live_and_a_file_is_not(
    speak: Run, engine: FakeSpeechEngine, tmp_path: Path
) -> None:
    speak(TEXT)
    speak(TEXT, "-o", str(tmp_path / "out.wav"))
    assert [request.is_live for request in engine.submitted.values()] == [True, False]


def test_text_comes_from_stdin_or_a_file(
    speak: Run, engine: FakeSpeechEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.read", lambda: "piped in")
    assert speak() == speak("-i", "-") == 0
    file = tmp_path / "chapter.txt"
    file.write_text("aus der Dose")
    assert speak("-i", str(file)) == 0
    prompts = [request.segments[0].prompt_ids for request in engine.submitted.values()]
    assert [bytes(ids) for ids in prompts] == [b"pipedin", b"pipedin", b"ausderDose"]


def test_options_reach_the_engine(speak: Run, engine: FakeSpeechEngine) -> None:
    assert speak("Hi.", "--voice", "bob", "--request-seed", "3", "--speed", "2") == 0
    (request,) = engine.submitted.values()
    assert (request.voice, request.sampling.seed) == ("bob", 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["Hi.", "-i", "file"], "not both"),
        (["-i", "/no/such/file"], "cannot be read"),
        (["Hi.", "-o", "/no/such/folder/out.wav"], "cannot be written"),
        (["Hi.", "-o", "out.txt"], "--format|format"),
        (["Hi.", "--play", "-o", "out.wav"], "leave out -o"),
        (["Hi.", "--play", "--format", "mp3"], "uses WAV"),
        (["Hi.", "--play"], "ffplay, mpv, aplay"),
    ],
)
def test_wrong_use_says_what_to_type(
    speak: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=message):
        speak(*argv)


def test_a_terminal_gets_no_bytes(speak: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(ConfigError, match=r"-o speech\.wav"):
        speak("Hi.")
    with pytest.raises(ConfigError, match="give a text"):
        speak()


def test_text_that_is_not_utf8_is_refused(speak: Run, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        speak("-i", str(file))


@pytest.mark.parametrize("argv", [["🎉"], ["Hi.", "--voice", "nobody"], ["Hi.", "--speed", "9"]])
def test_a_wrong_request_leaves_no_file(speak: Run, tmp_path: Path, argv: list[str]) -> None:
    path = tmp_path / "out.wav"
    with pytest.raises(InvalidRequest):
        speak(*argv, "-o", str(path))
    assert not path.exists()


def test_what_was_spoken_before_a_failure_is_a_whole_file(
    speak: Run, engine: FakeSpeechEngine, tmp_path: Path
) -> None:
    engine.error, engine.num_good = NonFinite("NaN."), 4
    path = tmp_path / "out.wav"
    with pytest.raises(NonFinite):
        speak(TEXT, "-o", str(path))
    with wave.open(str(path)) as reader:
        assert reader.getnframes() == 4 * engine.step_samples


def test_partly_spoken_text_is_reported(
    speak: Run, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    speak("Hello there. Где моя книга?")
    assert b"47.6% of the text was spoken" in capfdbinary.readouterr().err


def test_a_player_gets_the_stream(
    speak: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = tmp_path / "aplay"
    player.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'heard')!r}, 'wb')"
        ".write(sys.stdin.buffer.read())\n"
    )
    player.chmod(player.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert speak(TEXT, "--play") == 0
    assert len((tmp_path / "heard").read_bytes()) == 44 + 2 * num_samples(TEXT)


def test_captions_are_a_file(speak: Run, tmp_path: Path) -> None:
    sound, captions = str(tmp_path / "out.wav"), tmp_path / "out.vtt"
    document = "<speak>Hi <break time='1s'/>you</speak>"
    argv = (document, "-o", sound, "--input-format", "ssml", "--captions")
    assert speak(*argv, str(captions)) == 0
    assert captions.read_text().count("-->") == 2
    with pytest.raises(ConfigError, match=r"\.srt or \.vtt"):
        speak(*argv, "out.txt")

"""`triptych talk`: with files against a server, its errors, and turns of a microphone."""

from __future__ import annotations

import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.asr import wav
from support.full_app import open_full_app
from support.http import live
from support.speech_app import num_samples
from triptych.cli import main
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.host import EngineHost
from triptych.modalities.talk.ports import HEARING_RATE, SpeechStarted, SpeechStopped, TurnEvent
from triptych.modalities.talk.speaking.events import HeardWords, SpokenSound
from triptych.talk_cli import _hold_turn
from triptych.talk_devices import Loudspeaker, first_turn

NOISE = np.random.default_rng(0).normal(0, 0.1, HEARING_RATE).astype(np.float32)


def test_files_are_answered_by_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    full_app = open_full_app(tmp_path / "app")
    full_app.chat.answer = "It is Paris. "
    Path("question.wav").write_bytes(wav(NOISE))
    with live(full_app.app) as server:
        command = ["talk", "question.wav", "--text", "Really?", "--system", "Be brief."]
        assert main([*command, "-o", "a.wav", "--voice", "bob", "--server", server.url]) == 0
        assert main(["talk", "--text", "a", "-o", "a.wav", "--server", server.url, "--voice", "z"])
    assert capsys.readouterr().out == "It is Paris. \n" * 2
    with wave.open("a.wav") as file:
        assert file.getnframes() == 2 * num_samples("It is Paris.")
    first, second = list(full_app.chat.submitted.values())
    assert len(second.prompt_ids) > len(first.prompt_ids)
    assert {request.voice for request in full_app.speech.submitted.values()} == {"bob"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "a"], "pip install 'triptych[talk]'"),
        (["-o", "a.wav"], "pip install 'triptych[talk]'"),
        (["--text", "a", "--format", "mp3"], "name one with --output"),
        (["--text", "a", "-o", "a.txt"], "no known audio extension"),
        (["What is it?"], "a question as text is --text"),
        (["missing.wav"], "cannot be read"),
    ],
)
def test_errors_say_what_to_type(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert main(["talk", *arguments, "--no-server"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("question", "missing"),
    [(["--text", "a"], "speech"), (["question.wav"], "recognition and speech")],
)
def test_missing_models_are_named_before_any_is_loaded(
    question: list[str], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("models are loaded")

    monkeypatch.setattr(EngineHost, "start", start)
    monkeypatch.chdir(tmp_path)
    Path("question.wav").write_bytes(wav(NOISE))
    assert main(["talk", *question, "-o", "a.wav", "-m", "embedded", "--no-server"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"no model of {missing}." in said
    assert "talk -m embedded -m whisper-tiny.en" in said


def test_what_was_heard_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = "[Music] I said [/b]."
    talk = SimpleNamespace(turn=lambda said: iter([HeardWords(words)]))
    sink = SimpleNamespace(end_turn=lambda: None)
    _hold_turn(talk, b"", sink)  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"you: {words}\n"


class Scripted:
    """A detector that hears speech from 100 to 200 ms."""

    def __init__(self) -> None:
        self.num = 0

    def push(self, pcm_S: Pcm) -> Sequence[TurnEvent]:
        before, self.num = self.num, self.num + len(pcm_S)
        return [
            event
            for at, event in ((3200, SpeechStarted(100)), (4800, SpeechStopped(200)))
            if before < at <= self.num
        ]

    def rest(self) -> None: ...

    def reset(self) -> None: ...


def test_a_turn_is_cut_out_of_what_is_heard() -> None:
    blocks = iter(NOISE.reshape(-1, 500))
    turn = first_turn(blocks, Scripted())
    assert turn is not None
    np.testing.assert_array_equal(turn, NOISE[1600:3200])
    assert first_turn(iter([NOISE[:100]]), Scripted()) is None


def test_a_loudspeaker_plays_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Any] = []

    class Stream:
        def __init__(self, **options: Any) -> None:
            played.append(options["samplerate"])

        def write(self, pcm_S: Pcm) -> None:
            played.append(len(pcm_S))

        def __getattr__(self, name: str) -> Any:
            return lambda: played.append(name)

    devices = type("Devices", (), {"OutputStream": Stream, "PortAudioError": OSError})
    monkeypatch.setitem(sys.modules, "sounddevice", devices)
    with Loudspeaker() as loudspeaker:
        for size in (3, 5):
            loudspeaker.play(SpokenSound(NOISE[:size], 24_000))
        loudspeaker.end_turn()
    assert played == [24_000, "start", 3, 5, "stop", "close"]

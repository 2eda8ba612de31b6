"""`triptych talk`: with files against a server, its errors, and turns of a microphone."""

from __future__ import annotations

import sys
import threading
import wave
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.asr import wav
from support.full_app import open_full_app
from support.http import live, until
from support.speech_app import num_samples
from triptych.cli import main
from triptych.core.errors import ConfigError
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.host import EngineHost
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
    TurnEvent,
)
from triptych.modalities.talk.speaking.events import HeardWords, SpokenSound, TalkEvent
from triptych.talk_cli import Deaf, _hold_turn
from triptych.talk_devices import Loudspeaker, Microphone, turns_in

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
        (["--text", "a", "-o", "a.wav", "--interrupt"], "for a microphone"),
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


def answer(*events: TalkEvent) -> Any:
    """A conversation that answers with these."""
    return SimpleNamespace(turn=lambda said: (event for event in events))


def test_what_was_heard_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = "[Music] I said [/b]."
    sink = SimpleNamespace(end_turn=lambda is_cut: None)
    _hold_turn(answer(HeardWords(words)), b"", sink, Deaf())  # type: ignore[arg-type]
    assert capsys.readouterr().err == f"you: {words}\n"


class Scripted:
    """A detector that hears speech from 100 to 200 ms after `offset`, and `again_after` samples."""

    def __init__(self, offset: int = 0, again_after: int = 10**9) -> None:
        self.num = 0
        self.events = {
            start + at: kind((start + each) // 16)
            for start in (offset, offset + again_after)
            for at, kind, each in ((3200, SpeechStarted, 1600), (4800, SpeechStopped, 3200))
        }

    def push(self, pcm_S: Pcm, *, is_answering: bool = False) -> Sequence[TurnEvent]:
        before, self.num = self.num, self.num + len(pcm_S)
        return [event for at, event in self.events.items() if before < at <= self.num]

    def rest(self) -> None: ...

    def reset(self) -> None: ...


@dataclass
class Devices:
    """The package of devices: a microphone of `blocks`, and what was done with the loudspeaker."""

    blocks: Iterable[Pcm] = ()
    done: list[Any] = field(default_factory=list)
    on_write: Callable[[], Any] = int
    PortAudioError = OSError

    def InputStream(self, **options: Any) -> Any:  # noqa: N802 - the package's name
        read = ((block[:, None], False) for block in self.blocks)
        self.done.append("listen")
        return nullcontext(SimpleNamespace(read=lambda num: next(read)))

    def OutputStream(self, **options: Any) -> Any:  # noqa: N802
        devices = self

        class Stream:
            def write(self, pcm_S: Pcm) -> None:
                devices.done.append(len(pcm_S) if pcm_S.any() else "silence")
                devices.on_write()

            def __getattr__(self, name: str) -> Any:
                return lambda: devices.done.append(name)

        return Stream()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setitem(sys.modules, "sounddevice", devices)
    return devices


def test_turns_are_cut_out_of_what_is_heard() -> None:
    noted: list[TurnEvent] = []
    turns = turns_in(NOISE.reshape(-1, 500), Scripted().push, noted.append)
    (turn,) = turns
    np.testing.assert_array_equal(turn, NOISE[1600:3200])
    assert noted == [SpeechStarted(100), SpeechStopped(200)]
    late = turns_in(
        np.concatenate([np.zeros_like(NOISE)] * 3 + [NOISE]).reshape(-1, 500),
        Scripted(offset=3 * HEARING_RATE).push,
        noted.append,
    )
    np.testing.assert_array_equal(next(late), NOISE[1600:3200])


def test_a_microphone_is_closed_during_an_answer(devices: Devices) -> None:
    devices.blocks = list(NOISE.reshape(-1, 500))
    turns = Microphone(Scripted, stays_open=False).turns()
    for num_streams in (1, 2):
        assert len(next(turns)) == 1600
        assert devices.done == ["listen"] * num_streams


def test_an_answer_is_interrupted_by_speech(devices: Devices) -> None:
    """The loudspeaker stops within a piece, and what was said meanwhile is the next turn."""
    at_work = threading.Event()
    silence = np.zeros_like(NOISE)

    def blocks() -> Iterator[Pcm]:
        yield from [*NOISE.reshape(-1, 500), *silence.reshape(-1, 500)]
        assert at_work.wait(10)  # the answer is played
        yield from NOISE.reshape(-1, 500)

    devices.blocks = blocks()
    microphone = Microphone(lambda: Scripted(again_after=2 * HEARING_RATE), stays_open=True)

    def on_write() -> None:
        at_work.set()
        until(microphone.is_interrupting)

    devices.on_write = on_write
    with closing(microphone.turns()) as turns, Loudspeaker() as loudspeaker:
        next(turns)
        assert not microphone.is_interrupting()
        sound = SpokenSound(NOISE, 16_000)
        _hold_turn(answer(sound, sound), b"", loudspeaker, microphone)
        np.testing.assert_array_equal(next(turns), NOISE[1600:3200])
    assert devices.done == ["listen", "start", 320, "abort", "close"]


def test_a_loudspeaker_plays_in_order(devices: Devices) -> None:
    with Loudspeaker() as loudspeaker:
        for size in (3, 500):
            loudspeaker.play(SpokenSound(NOISE[:size], 24_000), Deaf())
        loudspeaker.end_turn(is_cut=False)
    assert devices.done == ["start", 3, 480, 20, "stop", "close"]


@pytest.mark.parametrize(
    ("news", "played"),
    [
        ([SpeechSuspected(0), None, SpeechDismissed(0)], [320, "silence", "silence", 320, 320]),
        ([SpeechSuspected(0), None, SpeechStarted(0)], [320, "silence", "silence"]),
        ([None, None, SpeechSuspected(0)], [320, 320, 320]),  # nothing is left to hold
    ],
)
def test_an_answer_is_held_while_speech_is_suspected(
    devices: Devices, news: list[TurnEvent | None], played: list[Any]
) -> None:
    microphone = Microphone(Scripted, stays_open=True)
    ahead = iter(news)

    def on_write() -> None:
        if event := next(ahead, None):
            microphone._note(event)

    devices.on_write = on_write
    with Loudspeaker() as loudspeaker:
        loudspeaker.play(SpokenSound(NOISE[:960], 16_000), microphone)
    assert devices.done[1:-2] == played


def test_a_microphone_that_is_gone_suspects_nothing(devices: Devices) -> None:
    def blocks() -> Iterator[Pcm]:
        yield NOISE[:256]
        raise OSError("unplugged")

    devices.blocks = blocks()
    detector: Any = SimpleNamespace(push=lambda pcm_S, **_: [SpeechSuspected(0)])
    microphone = Microphone(lambda: detector, stays_open=True)
    with closing(microphone.turns()) as turns, pytest.raises(ConfigError, match="unplugged"):
        next(turns)
    assert not microphone.is_suspecting()

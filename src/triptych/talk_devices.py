"""Microphone and loudspeaker of `triptych talk`, through the package `sounddevice`.

Owns the devices, and cutting what the microphone hears into turns. The microphone is closed while
an answer is played, so that a loudspeaker is not heard as a question.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from rich.console import Console

from triptych.core.errors import ConfigError
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import RichProgress
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.hearing.turns import VoiceTurnDetector
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    SpeechStarted,
    SpeechStopped,
    TurnDetector,
    TurnOptions,
)
from triptych.modalities.talk.speaking.events import SpokenSound

_BLOCK = 512
_FILES = "or use files, as in `triptych talk question.wav --output answer.wav`."


def sound_devices() -> Any:
    """The module `sounddevice`. Raises `ConfigError` where it, or its library, is missing."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # it needs PortAudio, which its wheels lack on Linux
        raise ConfigError(
            "Microphone and loudspeaker need the package sounddevice and the library PortAudio: pip"
            f" install 'triptych[talk]' and apt-get install libportaudio2, {_FILES}"
        ) from error
    return sounddevice


class Loudspeaker:
    """Plays sound as it comes."""

    def __init__(self) -> None:
        self._devices = sound_devices()
        self._stream: Any = None

    def play(self, sound: SpokenSound) -> None:
        """Play the next sound, after what was given before."""
        if self._stream is None:
            with _no_device(self._devices, "loudspeaker"):
                self._stream = self._devices.OutputStream(
                    samplerate=sound.sample_rate, channels=1, dtype="float32"
                )
                self._stream.start()
        self._stream.write(np.ascontiguousarray(sound.pcm_S))

    def end_turn(self) -> None:
        """Wait until all is played."""
        if self._stream is not None:
            self._stream.stop()
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.abort()
            self._stream.close()


@contextmanager
def microphone_turns() -> Iterator[Iterator[Pcm]]:
    """The turns that the microphone hears, each as samples at `HEARING_RATE`."""
    devices = sound_devices()
    network = open_network(ModelOptions(), RichProgress())
    console = Console(stderr=True, highlight=False)

    def turns() -> Iterator[Pcm]:
        while True:
            console.print("[dim]Speak; Ctrl-C leaves.[/]")
            with (
                _no_device(devices, "microphone"),
                devices.InputStream(
                    samplerate=HEARING_RATE, channels=1, dtype="float32", blocksize=_BLOCK
                ) as stream,
            ):
                blocks = iter(lambda: stream.read(_BLOCK)[0][:, 0], None)
                turn = first_turn(blocks, VoiceTurnDetector(network, TurnOptions()))
            if turn is not None:
                yield turn

    yield turns()


def first_turn(blocks: Iterator[Pcm], detector: TurnDetector) -> Pcm | None:
    """The samples of the first turn in a stream of sound; `None` if it ends before."""
    heard: list[Pcm] = []
    start = 0
    for block in blocks:
        heard.append(block)
        for event in detector.push(block):
            if isinstance(event, SpeechStarted):
                start = event.at_ms * HEARING_RATE // 1000
            elif isinstance(event, SpeechStopped):
                end = event.at_ms * HEARING_RATE // 1000
                turn: Pcm = np.concatenate(heard)[start:end]
                return turn
    return None


@contextmanager
def _no_device(devices: Any, kind: str) -> Iterator[None]:
    try:
        yield
    except devices.PortAudioError as error:
        raise ConfigError(f"There is no {kind} here ({error}): connect one, {_FILES}") from error

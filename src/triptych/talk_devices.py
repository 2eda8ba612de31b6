"""Microphone and loudspeaker of `triptych talk`, through the package `sounddevice`.

Owns the devices, and cutting what the microphone hears into turns. The microphone is closed while
an answer is played, so that a loudspeaker is not heard as a question; with headphones it may stay
open, and speech interrupts the answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from rich.console import Console

from triptych.core.errors import ConfigError
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import ModelOptions
from triptych.core.process.loop_thread import End
from triptych.core.weights.progress import RichProgress
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.hearing.turns import VoiceTurnDetector
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
    TurnDetector,
    TurnEvent,
    TurnOptions,
)
from triptych.modalities.talk.speaking.events import SpokenSound

if TYPE_CHECKING:
    from triptych.talk_cli import Listener

_BLOCK = 256
_PLAYED_S = 0.02
"""Seconds of sound that are played without a look at whether the user speaks."""
_KEPT_S = 1.0
"""Seconds before the present that a turn may begin at: the padding, and its detection."""
_FILES = "or use files, as in `triptych talk question.wav --output answer.wav`."
_HINT = "Speak; Ctrl-C leaves."
_OPEN_HINT = (
    "Speak, also to interrupt an answer; Ctrl-C leaves. Use headphones: the microphone would hear a"
    " loudspeaker as your words."
)


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

    def play(self, sound: SpokenSound, listener: Listener) -> None:
        """Play the next sound, after what was given before, until the user is interrupting.

        It is held, and silence played, while the listener is suspecting that.
        """
        if self._stream is None:
            with _no_device(self._devices, "loudspeaker"):
                self._stream = self._devices.OutputStream(
                    samplerate=sound.sample_rate, channels=1, dtype="float32", latency="low"
                )
                self._stream.start()
        size = round(_PLAYED_S * sound.sample_rate)
        for at in range(0, len(sound.pcm_S), size):
            while listener.is_suspecting():
                self._stream.write(np.zeros(size, np.float32))
            if listener.is_interrupting():
                return
            self._stream.write(np.ascontiguousarray(sound.pcm_S[at : at + size]))

    def end_turn(self, *, is_cut: bool) -> None:
        """Wait until all is played; what `is_cut` ends at once."""
        if self._stream is None:
            return
        if is_cut:
            self._stream.abort()
        else:
            self._stream.stop()
        self._stream.close()
        self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_turn(is_cut=True)


class Microphone:
    """Hears turns, each as samples at `HEARING_RATE`; one that `stays_open` hears during answers.

    `open_detector` is called for each stream of sound.
    """

    def __init__(self, open_detector: Callable[[], TurnDetector], *, stays_open: bool) -> None:
        self._devices = sound_devices()
        self._open_detector = open_detector
        self._stays_open = stays_open
        self._is_over = threading.Event()
        self._num_begun = self._num_taken = 0
        self._is_suspecting = self._is_answering = False

    def is_suspecting(self) -> bool:
        """Whether a turn may have begun: this is soon followed by one, or dismissed."""
        return self._is_suspecting

    def is_interrupting(self) -> bool:
        """Whether a turn has begun after the one that was taken last."""
        return self._num_begun > self._num_taken

    def turns(self) -> Generator[Pcm, None, None]:
        """Yield what is said, turn by turn. Raises `ConfigError` without a microphone."""
        console = Console(stderr=True, highlight=False)
        console.print(f"[dim]{_OPEN_HINT if self._stays_open else _HINT}[/]")
        with closing(self._heard_ahead() if self._stays_open else self._heard()) as turns:
            for turn in turns:
                self._num_taken += 1
                self._is_answering = True
                yield turn
                self._is_answering = False
                if not self._stays_open:
                    console.print(f"[dim]{_HINT}[/]")

    def _heard(self) -> Generator[Pcm, None, None]:
        """Yield turns; the microphone is closed until the next one is wanted."""
        while not self._is_over.is_set():
            with closing(self._in_stream()) as turns:
                turn = next(turns, None)
            if turn is None:
                return
            yield turn

    def _heard_ahead(self) -> Generator[Pcm, None, None]:
        """Yield turns of one stream, which goes on while the caller does something else."""
        ready: queue.SimpleQueue[Pcm | End] = queue.SimpleQueue()

        def listen() -> None:
            try:
                with closing(self._in_stream()) as turns:
                    for turn in turns:
                        ready.put(turn)
            except Exception as error:  # raised by the caller
                ready.put(End(error))
            else:
                ready.put(End())

        thread = threading.Thread(target=listen, name="microphone", daemon=True)
        thread.start()
        try:
            while not isinstance(item := ready.get(), End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            self._is_over.set()
            thread.join()

    def _in_stream(self) -> Generator[Pcm, None, None]:
        with (
            _no_device(self._devices, "microphone"),
            self._devices.InputStream(
                samplerate=HEARING_RATE, channels=1, dtype="float32", blocksize=_BLOCK
            ) as stream,
        ):
            try:
                yield from turns_in(self._blocks(stream), self._detect(), self._note)
            finally:
                self._is_suspecting = False  # no one would dismiss it

    def _detect(self) -> Callable[[Pcm], Sequence[TurnEvent]]:
        detector = self._open_detector()
        return lambda pcm_S: detector.push(pcm_S, is_answering=self._is_answering)

    def _blocks(self, stream: Any) -> Iterator[Pcm]:
        while not self._is_over.is_set():
            yield stream.read(_BLOCK)[0][:, 0].copy()

    def _note(self, event: TurnEvent) -> None:
        self._num_begun += isinstance(event, SpeechStarted)  # before the suspicion ends
        self._is_suspecting = isinstance(event, SpeechSuspected)


def open_microphone(*, stays_open: bool) -> Microphone:
    """Return a microphone with the detector of turns. Raises `ConfigError`."""
    sound_devices()  # its error comes before the download
    network = open_network(ModelOptions(), RichProgress())
    options = TurnOptions(reports_suspicion=stays_open)
    return Microphone(lambda: VoiceTurnDetector(network, options), stays_open=stays_open)


def turns_in(
    blocks: Iterable[Pcm],
    detect: Callable[[Pcm], Sequence[TurnEvent]],
    note: Callable[[TurnEvent], None],
) -> Generator[Pcm, None, None]:
    """Yield the samples of each turn in a stream of sound; calls `note` with each event first."""
    heard: list[Pcm] = []
    first = num_heard = start = 0  # samples of the stream
    is_speaking = False
    for block in blocks:
        heard.append(block)
        num_heard += len(block)
        for event in detect(block):
            note(event)
            if isinstance(event, SpeechStarted):
                start, is_speaking = event.at_ms * HEARING_RATE // 1000, True
            elif isinstance(event, SpeechStopped):
                end, is_speaking = event.at_ms * HEARING_RATE // 1000, False
                turn: Pcm = np.concatenate(heard)[max(0, start - first) : end - first]
                yield turn
        while not is_speaking and num_heard - first - len(heard[0]) > _KEPT_S * HEARING_RATE:
            first += len(heard.pop(0))


@contextmanager
def _no_device(devices: Any, kind: str) -> Iterator[None]:
    try:
        yield
    except devices.PortAudioError as error:
        raise ConfigError(f"There is no {kind} here ({error}): connect one, {_FILES}") from error

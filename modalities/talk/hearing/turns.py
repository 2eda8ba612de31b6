"""Finding the turns of a speaker in a stream of sound.

Owns OpenAI's options of server_vad: when speech counts as begun and as ended. Their clock is the
sound itself, in frames. Knows neither models of speech nor events of a wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

from triptych.core.errors import InvalidRequest
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.talk.hearing.echo import EchoGate
from triptych.modalities.talk.hearing.suspicion import Suspicion
from triptych.modalities.talk.hearing.voice_activity import (
    FRAME,
    Floats,
    VoiceNetwork,
    VoiceStream,
)
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    IdleTimedOut,
    SpeechStarted,
    SpeechStopped,
    TurnEvent,
    TurnOptions,
)

FRAME_MS = FRAME * 1000 // HEARING_RATE
HALF_MS = FRAME_MS // 2
MIN_SPEECH_FRAMES = 2
"""Frames in a row that begin a turn: a click fills one."""
HYSTERESIS = 0.15
"""Speech goes on down to this much below the threshold, as in Silero's own iterator."""
MAX_MS = 60_000
Frame: TypeAlias = Callable[[], TurnEvent | None]
"""The tracker's method that takes a frame, with that frame."""


def check_options(options: TurnOptions) -> None:
    """Raise `InvalidRequest` for an option out of range."""
    if not 0 < options.threshold < 1:
        raise InvalidRequest("threshold must be above 0 and below 1.", param="threshold")
    for name in ("prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms"):
        value = getattr(options, name)
        if value is not None and not 0 <= value <= MAX_MS:
            raise InvalidRequest(f"{name} must be 0 to {MAX_MS}.", param=name)


class TurnTracker:
    """Turns from one probability of speech per frame. Pure: equal frames give equal events."""

    def __init__(self, options: TurnOptions) -> None:
        self._options = options
        self._leave = max(options.threshold - HYSTERESIS, options.threshold / 2)
        self._now_ms = 0
        self._free_from_ms = 0  # sound before this belongs to an earlier turn
        self._is_speaking = False
        self._num_loud = 0
        self._suspicion = Suspicion(options.threshold) if options.reports_suspicion else None
        self._quiet_from_ms: int | None = None
        self._rested_ms: int | None = None
        self._echo = EchoGate()

    def take(
        self, probability: float, level: float = 1.0, *, is_answering: bool = False
    ) -> TurnEvent | None:
        """Take the next frame and its `level`; returns the event that it causes."""
        self._now_ms += FRAME_MS
        if self._is_speaking:
            event = self._during_speech(probability, level)
        else:
            is_echo = is_answering and self._echo.may_be_echo(level)
            event = self._before_speech(0.0 if is_echo else probability)
        suspected = self._suspect(probability, self._now_ms)
        return event or suspected or self._idle()

    def take_between(self, probability: float) -> TurnEvent | None:
        """Take the frame that ends half a frame after the last one: it can only be suspicious."""
        return self._suspect(probability, self._now_ms + HALF_MS)

    def rest(self) -> None:
        """Begin to count silence here, unless someone speaks."""
        self._rested_ms = None if self._is_speaking else self._now_ms

    def reset(self) -> None:
        """Forget the speech under way; the clock goes on."""
        self._is_speaking = False
        self._num_loud = 0
        self._free_from_ms = self._now_ms
        if self._suspicion is not None:
            self._suspicion.forget()

    def _suspect(self, probability: float, end_ms: int) -> TurnEvent | None:
        if self._suspicion is None:
            return None
        begin_ms, is_speaking = max(0, end_ms - FRAME_MS), self._is_speaking
        return self._suspicion.take(probability, begin_ms, end_ms, is_speaking=is_speaking)

    def _before_speech(self, probability: float) -> TurnEvent | None:
        self._num_loud = self._num_loud + 1 if probability >= self._options.threshold else 0
        if self._num_loud >= MIN_SPEECH_FRAMES:
            self._is_speaking = True
            self._quiet_from_ms = self._rested_ms = None
            begun_ms = self._now_ms - self._num_loud * FRAME_MS
            padded_ms = begun_ms - self._options.prefix_padding_ms
            return SpeechStarted(max(padded_ms, self._free_from_ms))
        return None

    def _idle(self) -> TurnEvent | None:
        """The end of a long silence; speech that is suspected may yet end it."""
        if self._suspicion is not None and self._suspicion.is_open:
            return None
        rested_ms, timeout_ms = self._rested_ms, self._options.idle_timeout_ms
        if rested_ms is None or timeout_ms is None or self._now_ms - rested_ms < timeout_ms:
            return None
        self._rested_ms = None
        return IdleTimedOut(rested_ms, self._now_ms)

    def _during_speech(self, probability: float, level: float) -> TurnEvent | None:
        if probability >= self._options.threshold:
            self._quiet_from_ms = None
            self._echo.hear(level)
        elif probability < self._leave and self._quiet_from_ms is None:
            self._quiet_from_ms = self._now_ms - FRAME_MS
        quiet_from_ms = self._quiet_from_ms
        silence_ms = self._options.silence_duration_ms
        if quiet_from_ms is None or self._now_ms - quiet_from_ms < silence_ms:
            return None
        self._echo.end_turn()
        self.reset()
        return SpeechStopped(quiet_from_ms)


class VoiceTurnDetector:
    """The turns of one stream: implements `ports.TurnDetector` with Silero's network.

    Suspicions have frames twice as often: the others lie half a frame earlier.
    """

    def __init__(self, network: VoiceNetwork, options: TurnOptions) -> None:
        check_options(options)
        self._voice = VoiceStream(network)
        self._between = VoiceStream(network, FRAME // 2) if options.reports_suspicion else None
        self._is_between_next = True
        self._tracker = TurnTracker(options)

    def push(self, pcm_S: Pcm, *, is_answering: bool = False) -> Sequence[TurnEvent]:
        """Take the next samples, and return the events of the frames that they complete."""
        take = partial(self._tracker.take, is_answering=is_answering)
        heard = zip(*self._voice.listen(pcm_S), strict=True)
        frames: list[Frame] = [partial(take, *each) for each in heard]
        if self._between is not None:
            frames = self._merged(frames, self._between.push(pcm_S))
        events = [take_frame() for take_frame in frames]
        return [event for event in events if event is not None]

    def _merged(self, whole: list[Frame], between: Floats) -> list[Frame]:
        """Put the frames of both streams in the order of their ends, which alternate."""
        others: list[Frame] = [partial(self._tracker.take_between, each) for each in between]
        pair = (others, whole) if self._is_between_next else (whole, others)
        merged = [each for both in zip_longest(*pair) for each in both if each is not None]
        self._is_between_next ^= len(merged) % 2 == 1
        return merged

    def rest(self) -> None:
        """Begin to count silence for `IdleTimedOut` from here."""
        self._tracker.rest()

    def reset(self) -> None:
        """Forget speech that is under way; the clock goes on."""
        self._tracker.reset()

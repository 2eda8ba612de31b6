"""Transcribing speech while it is spoken, with recognizers that read a recording at a time.

Owns the passes over the growing sound: their pace, which of them has heard the whole speech, and
where the next begins in a long one. Knows no model: a pass is a call of the recognition service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from triptych.core.media.audio.resampling import Pcm
from triptych.core.process.logs import fields
from triptych.modalities.asr.api.service import MIN_SECONDS, AsrService, TranscribeCall
from triptych.modalities.asr.api.transcript import Transcript, TranscriptSegment, gather
from triptych.modalities.asr.languages import UNSPACED, begins_unspaced
from triptych.modalities.talk.hearing.agreement import SettledText
from triptych.modalities.talk.hearing.voice_activity import FRAME, VoiceNetwork, VoiceStream
from triptych.modalities.talk.ports import HEARING_RATE

SPEECH = 0.35
"""Frames above this probability are speech, as for a turn at the default threshold."""
PAUSE, SHORT_PAUSE = 3 * FRAME, 2 * FRAME
"""Samples without speech after which the speaker may have ended: the last pass begins early, after
fewer where no other pass runs."""
MIN_NEWS_S = 0.5
"""Seconds of new sound for a pass in the middle of speech."""
MIN_REST_S = 0.1
FAILURE_REST_S = 1.0
"""Seconds without a pass after one that was refused or failed."""
LONG_S = 15
"""Seconds of sound in a pass from which on settled segments are left out of the next."""
MAX_LIVE_S = 1.0
"""A longer piece is no live sound, and counts as speech as a whole."""
_log = logging.getLogger(__name__)
_now_s = time.monotonic


@dataclass(frozen=True, slots=True)
class _Pass:
    """A running pass over the sound from `start` to `stop` (samples)."""

    start: int
    stop: int
    begun_s: float
    task: asyncio.Task[Transcript]


class IncrementalTranscriber:
    """One turn of a speaker: implements `ports.LiveTranscriber`.

    A pass reads all sound since the last frozen segment. While there is speech, passes rest as long
    as the last one took; at a pause one starts at once, in place of any that has not heard the end
    of the speech. If that pause was the last, its text is already there when `finish` asks for it.
    """

    def __init__(self, service: AsrService, call: TranscribeCall, network: VoiceNetwork) -> None:
        self._continues = service.check(call).traits.continues_text
        self._service, self._call = service, call
        self._voice = VoiceStream(network)
        self._sound = _Sound()
        self._text = SettledText()
        self._latest = ""
        self._language = ""
        self._speech_end = self._heard_to = 0
        self._has_speech = self._is_over = False
        self._running: _Pass | None = None
        self._tasks: set[asyncio.Task[Transcript]] = set()  # also of cancelled passes
        self._num_passes = 0
        self._next_at_s = self._failed_until_s = 0.0
        self._deltas: asyncio.Queue[str | None] = asyncio.Queue()
        self._tell: Callable[[str], None] = lambda text: None
        self._told = ""
        self._segments: tuple[TranscriptSegment, ...] = ()  # of the last pass over this sound

    def push(self, pcm_S: Pcm) -> None:
        """Take the next samples at `HEARING_RATE`. Never waits."""
        assert not self._is_over, "no sound after the end"
        self._sound.add(pcm_S)
        if len(pcm_S) > MAX_LIVE_S * HEARING_RATE:
            self._has_speech, self._speech_end = True, self._sound.stop
        else:
            self._listen(pcm_S)
        self._start_if_due()

    async def deltas(self) -> AsyncGenerator[str, None]:
        """Yield pieces of the text as soon as they are settled; ends once `finish` has."""
        while (delta := await self._deltas.get()) is not None:
            yield delta

    def on_expected(self, tell: Callable[[str], None]) -> None:
        """Call `tell` in pauses, as `ports.LiveTranscriber` says."""
        self._tell = tell

    async def finish(self) -> str:
        """Return the text of all that was pushed; empty for silence. Raises `RequestError`s."""
        self._is_over = True
        try:
            if self._has_speech:
                await self._hear_the_end()
            text = self._whole()
            if more := self._text.end(text):
                self._deltas.put_nowait(more)
            return text
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel what still runs. May be called at any time, also twice."""
        self._is_over = True
        self._running = None
        self._deltas.put_nowait(None)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _listen(self, pcm_S: Pcm) -> None:
        """Note where speech ends so far."""
        probabilities = self._voice.push(pcm_S)
        first = (self._sound.stop // FRAME - len(probabilities)) * FRAME
        for n, probability in enumerate(probabilities.tolist()):
            if probability >= SPEECH:
                self._has_speech, self._speech_end = True, first + (n + 1) * FRAME
                self._expect("")

    def _start_if_due(self) -> None:
        """Start a pass if there is one to make now."""
        if self._is_over or not self._has_speech or self._heard_to >= self._speech_end:
            return
        if _now_s() < self._failed_until_s:
            return
        running, now = self._running, self._sound.stop
        if now - self._speech_end >= (SHORT_PAUSE if running is None else PAUSE):
            if running is None or running.stop < self._speech_end:
                self._start()
        elif (
            running is None
            and now - self._heard_to >= MIN_NEWS_S * HEARING_RATE
            and _now_s() >= self._next_at_s
        ):
            self._start()

    def _start(self) -> _Pass:
        """Start a pass over all sound that is not frozen, in place of the running one."""
        if self._running is not None:
            self._running.task.cancel()
        start, stop = self._sound.start, self._sound.stop
        task = asyncio.create_task(self._recognize(self._sound.whole()))
        self._tasks.add(task)
        self._running = each = _Pass(start, stop, _now_s(), task)
        task.add_done_callback(lambda _: self._ended(each))
        return each

    async def _recognize(self, pcm_S: Pcm) -> Transcript:
        self._num_passes += 1
        caller = self._call.caller
        call = replace(
            self._call,
            caller=replace(caller, call_id=f"{caller.call_id}.pass{self._num_passes}"),
            prompt=f"{self._call.prompt} {self._text.frozen}" if self._continues else "",
            expected=self._segments,
        )
        padded_S = np.pad(pcm_S, (0, max(0, round(MIN_SECONDS * HEARING_RATE) - len(pcm_S))))
        async with aclosing(self._service.transcribe(call, padded_S)) as deltas:
            return gather([delta async for delta in deltas])

    def _ended(self, each: _Pass) -> None:
        """Take the text of a pass, unless another has taken its place."""
        self._tasks.discard(each.task)
        error = None if each.task.cancelled() else each.task.exception()
        if self._running is not each:
            return
        self._running = None
        took_s = _now_s() - each.begun_s
        self._next_at_s = _now_s() + max(took_s, MIN_REST_S)
        if error is not None:  # the last pass raises its own; one in between is only missed
            self._failed_until_s = _now_s() + FAILURE_REST_S
            _log.info("a live pass failed", extra=fields(error=type(error).__name__))
        elif not each.task.cancelled():
            self._take(each, each.task.result())

    def _take(self, each: _Pass, transcript: Transcript) -> None:
        self._heard_to, self._language = each.stop, transcript.language
        self._latest = self._spelled(transcript.text)
        self._segments = transcript.segments
        if more := self._text.take(self._latest, self._language):
            self._deltas.put_nowait(more)
        if each.stop - each.start >= LONG_S * HEARING_RATE:
            self._freeze(each, transcript)
        if each.stop >= self._speech_end + SHORT_PAUSE and not self._is_over:
            self._expect(self._whole())
        self._start_if_due()

    def _whole(self) -> str:
        """The text of all that was heard."""
        return (self._text.frozen + self._latest).strip()

    def _expect(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(text)

    def _spelled(self, text: str) -> str:
        """The text of sound after the frozen text, with the space that parts the two."""
        text = text.strip()
        is_spaced = self._language not in UNSPACED and not begins_unspaced(text)
        return f" {text}" if text and self._text.frozen and is_spaced else text

    def _freeze(self, each: _Pass, transcript: Transcript) -> None:
        """Leave settled sound out of later passes: all before a pause, or the settled segments."""
        if each.stop - self._speech_end >= PAUSE:
            self._cut(self._latest, each.stop)
            return
        settled = self._text.said[len(self._text.frozen) :]
        joined, cut = "", ("", 0.0)
        for segment in transcript.segments[:-1]:
            joined += segment.text
            if not settled.startswith(self._spelled(joined)):
                break
            cut = self._spelled(joined), segment.end_s
        if cut[0]:
            self._cut(cut[0], each.start + round(cut[1] * HEARING_RATE))

    def _cut(self, text: str, at: int) -> None:
        self._text.freeze(text)
        self._latest = self._latest[len(text) :]
        self._sound.drop_before(at)
        self._segments = ()

    async def _hear_the_end(self) -> None:
        """Wait for a pass that has heard all speech: the one that began at the pause, if it may."""
        running = self._running
        if running is not None and running.stop >= self._speech_end:
            await self._wait_for(running)
        if self._heard_to < self._speech_end:
            last = self._start()
            await self._wait_for(last)
            if not last.task.cancelled():  # else `close` was called
                last.task.result()

    async def _wait_for(self, each: _Pass) -> None:
        await asyncio.wait([each.task])
        self._ended(each)  # its callback may not have run yet


class _Sound:
    """Samples by their place in the stream: those from `start` to `stop` are kept."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._pieces: list[Pcm] = []

    def add(self, pcm_S: Pcm) -> None:
        """Add the next samples."""
        self._pieces.append(pcm_S)
        self.stop += len(pcm_S)

    def whole(self) -> Pcm:
        """All samples that are kept."""
        self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0]

    def drop_before(self, at: int) -> None:
        """Forget what is before the sample `at`."""
        at = min(at, self.stop)
        self._pieces = [self.whole()[at - self.start :].copy()]
        self.start = at

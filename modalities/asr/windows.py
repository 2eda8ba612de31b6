"""Long-form transcription: the prompt of each window, its segments, the start of the next.

Owns the policy, after Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision"
(2022), section 4.5, and OpenAI's `transcribe.py`. Knows no model and no torch, only frames and
token ids.
"""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from triptych.modalities.asr.spec import FRAMES_PER_POSITION, WhisperSpec

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION_RATIO = 2.4
"""Text with a higher ratio counts as repetitive."""
MIN_AVG_LOGPROB = -1.0
CONFIDENT_AVG_LOGPROB = -0.5
"""A complete text that is likelier than this may be repetitive, as a roll call is."""
MAX_NO_SPEECH_PROB = 0.6
SURE_NO_SPEECH_PROB = 0.9
"""Above this a text must be likelier than `CONFIDENT_AVG_LOGPROB` to be kept."""
MAX_PROMPT_TEMPERATURE = 0.5
"""Text sampled at a higher temperature is not in the prompt of the next window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of one decoding of a window; `token_ids` and `logprobs` exclude the end token.

    `avg_logprob` includes the end token, `compression_ratio` is that of the text. `has_ended`: the
    end token came before the bound on the number of tokens. `has_words`: the text is more than
    punctuation.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float
    has_ended: bool = True
    has_words: bool = True

    @property
    def is_silent(self) -> bool:
        """Whether there is no speech: no word, or likely silence and an unlikely text."""
        is_sure = self.no_speech_prob > SURE_NO_SPEECH_PROB
        bound = CONFIDENT_AVG_LOGPROB if is_sure else MIN_AVG_LOGPROB
        is_unlikely = self.no_speech_prob > MAX_NO_SPEECH_PROB and self.avg_logprob <= bound
        return is_unlikely or not self.has_words

    @property
    def is_good(self) -> bool:
        """Whether no higher temperature needs to be tried."""
        is_confident = self.has_ended and self.avg_logprob > CONFIDENT_AVG_LOGPROB
        return self.is_silent or (
            self.avg_logprob >= MIN_AVG_LOGPROB and (is_confident or not self.is_repetitive)
        )

    @property
    def is_repetitive(self) -> bool:
        """Whether the text repeats itself."""
        return self.compression_ratio > MAX_COMPRESSION_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpan:
    """Tokens `start .. stop - 1` of an attempt, spoken between two frames of the window."""

    start: int
    stop: int
    start_frame: int
    end_frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCut:
    """A window's spans, and the number of its frames that they cover."""

    spans: tuple[TimedSpan, ...]
    num_frames: int


def best_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """The likeliest attempt; repetitive ones without an end token come last."""
    return max(
        attempts, key=lambda each: (each.has_ended or not each.is_repetitive, each.avg_logprob)
    )


def has_words(text: str) -> bool:
    """Whether a text has anything except white space and punctuation."""
    return any(not char.isspace() and unicodedata.category(char)[0] != "P" for char in text)


def compression_ratio(text: str) -> float:
    """The size of the text divided by its size after zlib."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def temperatures(requested: float) -> tuple[float, ...]:
    """The temperatures to try in order: only the requested one, or for 0 the fallbacks."""
    return (requested,) if requested > 0 else FALLBACK_TEMPERATURES


def cut_window(spec: WhisperSpec, token_ids: Sequence[int], num_frames: int) -> WindowCut:
    """Cut the text of a window, of which `num_frames` hold audio, at its timestamps.

    Two timestamps in a row separate two spans. An unfinished span at the end is dropped, and
    the next window begins with it.
    """
    is_time = [spec.is_timestamp(token_id) for token_id in token_ids]
    seams = [at + 1 for at in range(len(is_time) - 1) if is_time[at] and is_time[at + 1]]
    if not seams:
        return WindowCut(spans=_whole(spec, token_ids, num_frames), num_frames=num_frames)
    ends_in_silence = is_time[-2:] == [False, True]
    bounds = [0, *seams, *([len(token_ids)] if ends_in_silence else [])]
    spans = tuple(
        TimedSpan(
            start=start,
            stop=stop,
            start_frame=_frame(spec, token_ids[start]),
            end_frame=_frame(spec, token_ids[stop - 1]),
        )
        for start, stop in pairwise(bounds)
    )
    done = num_frames if ends_in_silence else spans[-1].end_frame
    # Two zero timestamps at the start would repeat the same window forever.
    return WindowCut(spans=spans, num_frames=min(done, num_frames) or num_frames)


def _whole(spec: WhisperSpec, token_ids: Sequence[int], num_frames: int) -> tuple[TimedSpan, ...]:
    """One span of all tokens, up to the last timestamp."""
    times = [_frame(spec, token_id) for token_id in token_ids if spec.is_timestamp(token_id)]
    end_frame = times[-1] if times and times[-1] > 0 else num_frames
    return (TimedSpan(start=0, stop=len(token_ids), start_frame=0, end_frame=end_frame),)


def _frame(spec: WhisperSpec, token_id: int) -> int:
    return (token_id - spec.first_timestamp_id) * FRAMES_PER_POSITION


class TranscriptCursor:
    """The state of a transcript: the frame reached, and the prompt of the next window."""

    def __init__(self, spec: WhisperSpec, prompt_ids: Sequence[int]) -> None:
        self._spec = spec
        self._context = list(prompt_ids)
        self.frame = 0

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the start token: the latest text so far, or none."""
        latest = self._context[-self._spec.max_prompt_tokens :]
        return (self._spec.previous_id, *latest) if latest else ()

    def take(self, attempt: Attempt, num_frames: int) -> tuple[TimedSpan, ...]:
        """Add a finished window of `num_frames`, and return its spans with text."""
        if attempt.is_silent:
            self.frame += num_frames
            return ()
        cut = cut_window(self._spec, attempt.token_ids, num_frames)
        spoken = tuple(span for span in cut.spans if self._is_spoken(attempt, span))
        for span in spoken:
            self._context.extend(attempt.token_ids[span.start : span.stop])
        if attempt.temperature > MAX_PROMPT_TEMPERATURE:
            self._context.clear()
        self.frame += cut.num_frames
        return spoken

    def _is_spoken(self, attempt: Attempt, span: TimedSpan) -> bool:
        tokens = attempt.token_ids[span.start : span.stop]
        return span.end_frame > span.start_frame and any(map(self._spec.is_text, tokens))

"""The policy of playback deadlines: which rows take part in the next step of a speech model.

Owns the choice and the predicted durations that deadlines are counted back with. Reads the
scheduler's state and changes nothing. All rules follow from one number per stream, the moment its
listener's buffer runs dry (`playback`):

1. An audio step decodes chunks that are ready: a stream's first frames, a chunk that has its target
   size, the end of a segment, or any chunk for which waiting longer would be too late
   (`_ready_s`).
2. A token step is due when the existing sound, decoded or not, runs out, less the time that the
   steps after it take (`_next_tokens`).
3. Either kind takes its rows in the order of these moments. While the first of them can be kept
   every stream takes part, since a full step is the cheapest. Otherwise streams far ahead of their
   listeners are left out (`_select_chunks`, `_add_row`), and prompts are admitted by as many tokens
   as there is time for (`_add_prompt`).
4. A stream that has not begun is due when its first audio was promised. Once that is missed, it
   yields to streams with a listener, for a limited time (`_next_tokens`).
5. A stream without a listener is never due.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.core.options.config import SpeechOptions
from triptych.modalities.tts.plan import FrameClock
from triptych.modalities.tts.scheduling.state import SpeechModel, SpeechState, SpokenSegment, Stream
from triptych.modalities.tts.wire import VoiceClip
from triptych.schedulers.batcher import ScheduledStep, Unit
from triptych.schedulers.cost import CostModel
from triptych.schedulers.tokens.batch import TokenBatch
from triptych.schedulers.tokens.state import TokenProgress
from triptych.schedulers.tokens.step import TokenLimits, TokenStep

CUSHION_ROUNDS = 3.0
"""Rounds of a full token step and a full audio step that a stream's first chunk must last, in
addition to the wait for other streams."""
SLACK_STEPS = 8
"""A stream ahead of its listener by the time of so many steps may be left out of one."""
RESERVE_STEPS = 16
"""Time kept for listeners, in steps, before streams without a listener get any."""
OVERDUE_FACTOR = 4.0
"""Multiple of the promised time to first audio after which a missed promise precedes all others."""
_LONGEST_CHUNK_S = 1.0
_WORTHWHILE = 0.97  # doubling a chunk must lower the price of a frame to this
_FADE = 0.005  # of the longest wait per step: it is forgotten after some 200 steps
_LEAST_PROMPT = 16  # tokens: less of a prompt is not worth its share of a step
_OVERDUE_PROMPT = 64  # tokens of an overdue prompt that are admitted at any cost


class SpeechRound(NamedTuple):
    """The time to give every stream a step and a frame, and the chunk sizes that follow from it.

    With `first_frames` a stream does not run dry before its turn comes again; beyond `best_frames`
    a longer chunk makes a frame hardly cheaper.
    """

    token_s: float
    audio_s: float
    first_frames: int
    best_frames: int


class SpeechCosts:
    """Predicts the seconds of token and audio steps, by `costs`, and of the wait for a turn."""

    def __init__(self, clock: FrameClock, costs: CostModel) -> None:
        self._costs = costs
        self._clock = clock
        self._rounds: dict[int, SpeechRound] = {}
        self.wait_s = 0.0
        """The recent worst excess of a step's actual end over its predicted end, mostly the wait
        for earlier steps."""

    def round(self, num_rows: int) -> SpeechRound:
        """A round of `num_rows` streams."""
        if num_rows not in self._rounds:
            token_s, audio_s = self.token_s(num_rows), self.audio_s(num_rows, num_rows)
            cushion_s = CUSHION_ROUNDS * (token_s + audio_s) + self.wait_s
            first_frames = math.ceil(cushion_s / self._clock.frame_s)
            first_frames = max(1, first_frames) + self._clock.lookahead_frames
            best_frames = max(first_frames, self._efficient_frames(max(1, num_rows)))
            self._rounds[num_rows] = SpeechRound(token_s, audio_s, first_frames, best_frames)
        return self._rounds[num_rows]

    def token_s(self, num_rows: int, num_prompt_tokens: int = 0) -> float:
        """Seconds of a token step of decode rows and prompt tokens."""
        return self._costs.trend("decode", token_work(num_rows, num_prompt_tokens))

    def audio_s(self, num_rows: int, num_frames: int) -> float:
        """Seconds of an audio step; `num_frames` is the sum over its rows."""
        return self._costs.trend("audio", audio_work(num_rows, num_frames))

    def _efficient_frames(self, num_rows: int) -> int:
        frames = 1
        while 2 * frames * self._clock.frame_s <= _LONGEST_CHUNK_S:
            longer_s = self.audio_s(num_rows, 2 * frames * num_rows)
            if longer_s > 2 * _WORTHWHILE * self.audio_s(num_rows, frames * num_rows):
                break
            frames *= 2
        return frames

    def forget_rounds(self) -> None:
        """Drop cached rounds after a step was observed."""
        self._rounds.clear()

    def observe_wait(self, seconds: float) -> None:
        """Learn how much later than predicted a step ended."""
        self.wait_s = max(seconds, (1 - _FADE) * self.wait_s)


def token_work(num_rows: int, num_prompt_tokens: int) -> dict[str, float]:
    """The features that a token step's seconds are predicted from."""
    return {"rows": num_rows, "prompt_tokens": num_prompt_tokens}


def audio_work(num_rows: int, num_frames: int) -> dict[str, float]:
    """The features that an audio step's seconds are predicted from."""
    return {"rows": num_rows, "frames": num_frames}


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """The next chunk of a stream: the number of step codes, and of their whole frames."""

    stream: Stream
    num_codes: int
    num_frames: int
    is_last: bool
    due_s: float

    @property
    def unit(self) -> Unit:
        """The stream's decoder."""
        return self.stream.decoder


@dataclass(slots=True, kw_only=True)
class SpeechStep(ScheduledStep):
    """A step of `tokens`, of audio or of voice encoding, expected to take `expected_s`.

    An audio step is due when the first of its listeners runs dry.
    """

    tokens: TokenStep | None = None
    expected_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class ClipEncoding(Unit):
    """A clip whose voice is encoded."""

    clip: VoiceClip


class _NextToken(NamedTuple):
    """The next token of a stream's segment, and when it must be sampled."""

    due_s: float
    stream: Stream
    segment: SpokenSegment
    progress: TokenProgress

    @property
    def name(self) -> str:
        return self.segment.row.name

    @property
    def is_prompt(self) -> bool:
        return not self.progress.is_answered

    @property
    def is_first(self) -> bool:
        """Whether nothing of the stream was computed yet."""
        return self.segment.index == 0 and self.progress.is_waiting


@dataclass(slots=True)
class _TokenStepBudget:
    """The contents of a token step as it is filled, and the moment by which it must end."""

    costs: SpeechCosts
    limit_s: float
    num_rows: int = 0
    num_tokens: int = 0
    due_s: float = math.inf
    excluded: set[str] = field(default_factory=set)

    def add(self, token: _NextToken, *, num_rows: int = 0, num_tokens: int = 0) -> None:
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        self.due_s = min(self.due_s, token.due_s)
        self.limit_s = min(self.limit_s, token.due_s)

    def cost_s(self, num_rows: int = 0, num_tokens: int = 0) -> float:
        """Seconds of the step with that many more rows and prompt tokens."""
        return self.costs.token_s(self.num_rows + num_rows, self.num_tokens + num_tokens)


class SpeechPolicy:
    """Chooses the steps of one model. Has no state."""

    def __init__(
        self,
        model: SpeechModel,
        options: SpeechOptions,
        state: SpeechState,
        tokens: TokenBatch,
        costs: SpeechCosts,
    ) -> None:
        self._model = model
        self._clock = model.clock
        self._options = options
        self._state = state
        self._tokens = tokens
        self._costs = costs

    def choose_step(self, now_s: float) -> SpeechStep | None:
        """The step that is due first, of any kind.

        Audio goes first where that makes no stream late: a finished frame should be sent.
        """
        audio = self._audio_step(now_s)
        steps = [audio, self._token_step(now_s), self._voice_step()]
        known = [step for step in steps if step is not None]
        ready = [step for step in known if step.not_before_s <= now_s]
        if not ready:
            return min(known, key=lambda step: step.not_before_s, default=None)
        first = min(ready, key=lambda step: step.due_s)
        if audio is None or audio.not_before_s > now_s:
            return first
        return audio if now_s + audio.expected_s + first.expected_s <= first.due_s else first

    def _voice_step(self) -> SpeechStep | None:
        """Encode the voice of a clip that a stream waits for."""
        stream = self._state.next_voiceless()
        if stream is None or stream.request.clip is None:
            return None
        clip, due_s = stream.request.clip, stream.playback.due_s
        work = {"samples": float(len(clip.pcm))}
        return SpeechStep(kind="voice", work=work, rows=[ClipEncoding(clip=clip)], due_s=due_s)

    # Audio steps.

    def _audio_step(self, now_s: float) -> SpeechStep | None:
        """The next audio step; `None` where no chunk becomes ready before another event."""
        pace = self._costs.round(len(self._state.speaking))
        chunks = [chunk for stream in self._state.speaking for chunk in self._chunk(stream, pace)]
        ready = [chunk for chunk in chunks if self._ready_s(chunk, pace) <= now_s]
        if not ready:
            ready_s = min((self._ready_s(chunk, pace) for chunk in chunks), default=math.inf)
            if math.isinf(ready_s):
                return None
            return SpeechStep(kind="audio", not_before_s=ready_s)
        # Chunks that become ready while the step runs are part of it.
        end_s = now_s + self._costs.audio_s(len(ready), _num_frames(ready))
        ready = [chunk for chunk in chunks if self._ready_s(chunk, pace) <= end_s]
        ready.sort(key=lambda chunk: (chunk.due_s, chunk.stream.rank))
        others = set(self._state.speaking) - {chunk.stream for chunk in ready}
        limit_s = min(ready[0].due_s - self._costs.wait_s, self._next_sound_s(others))
        rows = tuple(self._select_chunks(ready, limit_s, now_s))
        num_frames = _num_frames(rows)
        return SpeechStep(
            kind="audio",
            work=audio_work(len(rows), num_frames),
            rows=rows,
            due_s=rows[0].due_s - self._costs.wait_s,
            expected_s=self._costs.audio_s(len(rows), num_frames),
        )

    def _select_chunks(
        self, ready: list[AudioChunk], limit_s: float, now_s: float
    ) -> Iterator[AudioChunk]:
        """Chunks in order of due time, those that can wait only while they fit by `limit_s`."""
        if ready[0].stream.decoder.is_alone:
            yield ready[0]
            return
        num_rows = num_frames = 0
        alone_s = self._costs.audio_s(1, ready[0].num_frames)
        is_lost = now_s + alone_s > limit_s
        limit_s = max(limit_s, now_s + 2 * alone_s)
        pace = self._costs.round(len(self._state.speaking))
        soon_s = now_s + is_lost * (pace.token_s + pace.audio_s)
        for chunk in ready:
            cost_s = self._costs.audio_s(num_rows + 1, num_frames + chunk.num_frames)
            reserve_s = self._reserve_s(chunk.stream)
            is_late = now_s + reserve_s + cost_s > limit_s and chunk.due_s > soon_s
            if chunk.stream.decoder.is_alone or (num_rows and is_late):
                continue
            yield chunk
            num_rows, num_frames = num_rows + 1, num_frames + chunk.num_frames

    def _reserve_s(self, stream: Stream) -> float:
        """Time kept for listeners: a stream without one gets only time beyond it."""
        if stream.request.is_live:
            return 0.0
        return RESERVE_STEPS * self._costs.round(len(self._state.speaking)).token_s

    def _chunk(self, stream: Stream, pace: SpeechRound) -> Iterator[AudioChunk]:
        """The chunk of a stream that could be decoded now, if there is one."""
        if stream.is_paused or stream.is_decoding:
            return
        segment = stream.segments[0]
        num_done = self._clock.num_frames(segment.num_pushed)
        num_ready = self._clock.num_frames(len(segment.codes)) - num_done
        num_frames = min(num_ready, self._fixed_frames(stream) or pace.best_frames)
        is_last = segment.end is not None and num_frames == num_ready
        if num_frames or is_last:
            stop = self._clock.num_steps(num_done + num_frames)
            num_codes = (len(segment.codes) if is_last else stop) - segment.num_pushed
            yield AudioChunk(stream, num_codes, num_frames, is_last, stream.playback.due_s)

    def _fixed_frames(self, stream: Stream) -> int:
        """The chunk size given by `chunk_size`; 0 without that option."""
        sizes = self._options.chunk_size
        return sizes[min(stream.num_chunks, len(sizes) - 1)] if sizes else 0

    def _ready_s(self, chunk: AudioChunk, pace: SpeechRound) -> float:
        """The moment from which a chunk may be decoded."""
        fixed = self._fixed_frames(chunk.stream)
        if chunk.is_last or chunk.num_frames >= (fixed or self._target(chunk.stream, pace)):
            return -math.inf
        if fixed:
            return math.inf
        return chunk.due_s - pace.token_s - pace.audio_s - self._costs.wait_s

    def _target(self, stream: Stream, pace: SpeechRound) -> int:
        """Target size of a chunk in frames: small at first, then doubled each time."""
        if not stream.request.is_live:
            return pace.best_frames
        return min(pace.best_frames, 2 * stream.chunk_frames or pace.first_frames)

    # Token steps.

    def _token_step(self, now_s: float) -> SpeechStep | None:
        """The next token step; `None` where no stream could take part.

        Delayed streams are left out in any case, all others only if another stream gains by it.
        """
        tokens = sorted(
            self._next_tokens(now_s), key=lambda token: (token.due_s, token.stream.rank)
        )
        if not tokens:
            return None
        delayed, not_before_s = self._find_delayed(tokens, now_s)
        budget = self._fill_step([token for token in tokens if token.name not in delayed], now_s)
        limits = TokenLimits(frozenset(budget.excluded | delayed), budget.num_tokens)
        step = self._tokens.choose_step(limits)
        step = step or self._tokens.choose_step(TokenLimits(frozenset(delayed)))
        if step is None:
            has_time = not_before_s > now_s
            later = SpeechStep(kind="decode", not_before_s=not_before_s)
            return later if has_time else None
        num_rows, num_prompt = step.work["decode_rows"], step.work["prompt_tokens"]
        return SpeechStep(
            kind=step.kind,
            work=token_work(int(num_rows), int(num_prompt)),
            rows=step.rows,
            due_s=budget.due_s,
            tokens=step,
            expected_s=budget.cost_s(),
        )

    def _next_tokens(self, now_s: float) -> Iterator[_NextToken]:
        num_rows = len(self._state.speaking)
        step_s = self._costs.round(num_rows).token_s
        after_s = self._costs.audio_s(1, 1) + self._costs.wait_s
        for stream in self._state.speaking:
            segment = stream.sampling
            if segment is None or stream.is_paused:
                continue
            progress = self._tokens.progress(segment.row)
            if not progress.can_step:
                continue
            sound_s, num_steps = self._undecoded_sound(stream, segment, progress.num_outputs)
            due_s = stream.playback.due_s + sound_s - after_s - (num_steps - 1) * step_s
            if progress.num_left > 1:
                more_s = self._costs.token_s(num_rows, progress.num_left) - step_s
                due_s -= max(0.0, more_s)
            if not stream.playback.has_begun and due_s < now_s:
                due_s += OVERDUE_FACTOR * self._options.target_first_audio_s
            yield _NextToken(due_s, stream, segment, progress)

    def _next_sound_s(self, streams: Iterable[Stream]) -> float:
        """The moment by which the device must be free for an audio step of `streams`."""
        due_s = sorted(s.playback.due_s for s in streams if s.playback.has_begun)
        if not due_s or math.isinf(due_s[0]):
            return math.inf
        num_rows = bisect_right(due_s, due_s[0] + self._costs.audio_s(len(due_s), len(due_s)))
        return due_s[0] - self._costs.audio_s(num_rows, 2 * num_rows) - self._costs.wait_s

    def _undecoded_sound(
        self, stream: Stream, segment: SpokenSegment, num_outputs: int
    ) -> tuple[float, int]:
        """Seconds of sound that need no more tokens, and the steps until one more frame."""
        sound_s = 0.0
        for before in stream.segments:
            if before is not segment:
                num_frames = self._clock.num_frames(len(before.codes))
                sound_s += num_frames * self._clock.frame_s + before.spec.pause_s
                sound_s -= before.num_given / self._model.sample_rate
        lookahead = self._clock.lookahead_frames
        num_frames = max(0, self._clock.num_frames(num_outputs) - lookahead)
        sound_s += num_frames * self._clock.frame_s - segment.num_given / self._model.sample_rate
        num_steps = self._clock.num_steps(num_frames + lookahead + 1) - num_outputs
        return max(0.0, sound_s), max(1, num_steps)

    def _find_delayed(self, tokens: list[_NextToken], now_s: float) -> tuple[set[str], float]:
        """Names of rows that options keep out of steps, and until when the first of them."""
        until: dict[str, float] = {}
        if self._options.ce_delay_ms:
            until |= self._first_prompt_delays([token for token in tokens if token.is_first])
        if self._options.max_lead_s:
            for token in tokens:
                lead_s = token.due_s - self._options.max_lead_s
                if token.stream.playback.has_begun and math.isfinite(lead_s):
                    until[token.name] = lead_s
        until = {name: until_s for name, until_s in until.items() if until_s > now_s}
        return set(until), min(until.values(), default=0.0)

    def _first_prompt_delays(self, first: list[_NextToken]) -> dict[str, float]:
        """Hold new prompts back until the oldest has waited `ce_delay_ms` or they fill a step."""
        if len(first) >= len(self._tokens.state.free_slots):
            return {}
        delay_s = self._options.ce_delay_ms / 1e3
        oldest_s = min((token.stream.job.arrival_s for token in first), default=0.0)
        return {token.name: oldest_s + delay_s for token in first}

    def _fill_step(self, tokens: list[_NextToken], now_s: float) -> _TokenStepBudget:
        limit_s = self._next_sound_s(self._state.speaking)
        budget = _TokenStepBudget(self._costs, limit_s=limit_s)
        slack_s = SLACK_STEPS * self._costs.token_s(len(tokens))
        if self._prompts_go_first(tokens, now_s):
            budget.excluded.update(token.name for token in tokens if not token.is_prompt)
            tokens = [token for token in tokens if token.is_prompt]
            slack_s = math.inf
        has_silent_row = self._options.enable_prioritize_first_decode and any(
            not token.is_prompt and not token.stream.playback.has_begun for token in tokens
        )
        for token in tokens:
            is_first_prompt = token.is_prompt and not token.stream.playback.has_begun
            if is_first_prompt and has_silent_row:
                budget.excluded.add(token.name)
            elif token.is_prompt:
                self._add_prompt(budget, token, now_s)
            else:
                self._add_row(budget, token, now_s, slack_s)
        return budget

    def _add_row(
        self, budget: _TokenStepBudget, token: _NextToken, now_s: float, slack_s: float
    ) -> None:
        is_far = token.due_s - now_s > slack_s
        reserve_s = self._reserve_s(token.stream)
        if is_far and now_s + reserve_s + budget.cost_s(num_rows=1) > budget.limit_s:
            budget.excluded.add(token.name)
        else:
            budget.add(token, num_rows=1)

    def _add_prompt(self, budget: _TokenStepBudget, token: _NextToken, now_s: float) -> None:
        """Admit as much of a prompt as there is time for."""
        num_left = num_tokens = token.progress.num_left
        time_s = budget.limit_s - now_s - budget.cost_s() - self._reserve_s(token.stream)
        time_s = max(0.0, time_s)
        more_s = budget.cost_s(num_tokens=num_left) - budget.cost_s()
        if more_s > time_s:
            num_tokens = int(num_left * time_s / more_s)
        if token.due_s < now_s:
            num_tokens = max(num_tokens, min(num_left, _OVERDUE_PROMPT))
        if num_tokens < min(_LEAST_PROMPT, num_left):
            budget.excluded.add(token.name)
        else:
            budget.add(token, num_tokens=num_tokens)

    def _prompts_go_first(self, tokens: Iterable[_NextToken], now_s: float) -> bool:
        """Whether so few rows decode that prompts run alone, and no buffer runs dry meanwhile."""
        least = self._options.min_batch_size_tg
        if not least:
            return False
        prompts = [token for token in tokens if token.is_prompt]
        rows = [token for token in tokens if not token.is_prompt]
        num_tokens = sum(token.progress.num_left for token in prompts)
        due_s = min((token.due_s for token in rows), default=math.inf)
        is_safe = now_s + self._costs.token_s(0, num_tokens) + self._costs.token_s(least) <= due_s
        return bool(prompts) and len(rows) < least and is_safe


def _num_frames(chunks: Iterable[AudioChunk]) -> int:
    return sum(chunk.num_frames for chunk in chunks)

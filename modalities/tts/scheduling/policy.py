"""Which rows take part in the next step of a speech model: the policy of playback deadlines.

Owns the choice. Reads the scheduler's state and writes nothing. All of it follows from one number
per stream, the moment its listener's buffer runs dry (`playback`):

- An audio step decodes chunks that are ripe: a stream's first frame, a chunk as long as its growth
  has come to, the end of a segment, or whatever there is when waiting longer would be too late.
- A token step is due when the sound that is there already, decoded or not, runs out, less the
  time that the steps after it take.
- Either kind takes its rows in the order of these moments. As long as the first of them is kept,
  every stream takes part, since a full step is the cheapest. Else those far ahead of their listener
  stay out of it, and prompts are admitted by as many tokens as there is time for.
- A stream that has not begun is due when its first audio was promised. Once that is broken, it
  yields to those with a listener, but only for so long.
- A stream without a listener is never due.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.core.options.config import SpeechOptions
from triptych.modalities.tts.scheduling.costs import (
    SpeechCosts,
    SpeechRound,
    audio_work,
    token_work,
)
from triptych.modalities.tts.scheduling.state import SpeechModel, SpeechState, SpokenSegment, Stream
from triptych.modalities.tts.wire import VoiceClip
from triptych.schedulers.batcher import ScheduledStep, Unit
from triptych.schedulers.tokens.batch import TokenBatch
from triptych.schedulers.tokens.policy import TokenLimits, TokenStep
from triptych.schedulers.tokens.state import TokenProgress

EASE_STEPS = 8
"""A stream ahead of its listener by the time of so many steps may be left out of one."""
RESERVE_STEPS = 16
"""Listeners keep the time of so many steps in hand before streams without one get any."""
PATIENCE = 4.0
"""Times the promised time to first audio after which a broken promise comes before all others."""
_LEAST_PROMPT = 16  # tokens: less of a prompt is not worth its share of a step
_OVERDUE_PROMPT = 64  # tokens that are admitted whatever has to wait for them


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """The next chunk of a stream: how many step codes, and their whole frames."""

    stream: Stream
    num_codes: int
    num_frames: int
    is_last: bool
    due_s: float

    @property
    def unit(self) -> Unit:
        """What decodes it."""
        return self.stream.decoder


@dataclass(slots=True, kw_only=True)
class SpeechStep(ScheduledStep):
    """A step of `tokens`, of audio or of reading a voice, which this policy has `expected_s` for.

    An audio step is due when the first of its listeners runs dry.
    """

    tokens: TokenStep | None = None
    expected_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class VoiceReading(Unit):
    """A clip whose voice is read."""

    clip: VoiceClip


class _Need(NamedTuple):
    """A stream's next token: how far it is, and when it must be sampled."""

    due_s: float
    stream: Stream
    segment: SpokenSegment
    progress: TokenProgress

    @property
    def is_prompt(self) -> bool:
        return not self.progress.is_answered

    @property
    def is_first(self) -> bool:
        """Whether nothing of the stream was computed yet."""
        return self.segment.index == 0 and self.progress.is_waiting


@dataclass(slots=True)
class _Fill:
    """A token step as it is filled: rows, tokens of prompts, and the moments to keep."""

    costs: SpeechCosts
    limit_s: float
    num_rows: int = 0
    num_tokens: int = 0
    due_s: float = math.inf
    held: set[str] = field(default_factory=set)

    def add(self, need: _Need, *, num_rows: int = 0, num_tokens: int = 0) -> None:
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        self.due_s = min(self.due_s, need.due_s)
        self.limit_s = min(self.limit_s, need.due_s)

    def cost_s(self, num_rows: int = 0, num_tokens: int = 0) -> float:
        """What the step would take with so many more."""
        return self.costs.token_s(self.num_rows + num_rows, self.num_tokens + num_tokens)


class SpeechPolicy:
    """Chooses the steps of one model. Holds no state of its own."""

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
        """The step that is due first, whatever its kind.

        Audio goes first where that makes no stream late: a frame that is there should be sent.
        """
        audio = self._audio(now_s)
        steps = [audio, self._token_step(now_s), self._voice()]
        known = [step for step in steps if step is not None]
        ready = [step for step in known if step.not_before_s <= now_s]
        if not ready:
            return min(known, key=lambda step: step.not_before_s, default=None)
        first = min(ready, key=lambda step: step.due_s)
        if audio is None or audio.not_before_s > now_s:
            return first
        return audio if now_s + audio.expected_s + first.expected_s <= first.due_s else first

    def _voice(self) -> SpeechStep | None:
        """VoiceReading the voice of a clip that a stream waits for."""
        stream = self._state.next_reader()
        if stream is None or stream.request.clip is None:
            return None
        clip, due_s = stream.request.clip, stream.playback.due_s
        work = {"samples": float(len(clip.pcm))}
        return SpeechStep(kind="voice", work=work, rows=[VoiceReading(clip=clip)], due_s=due_s)

    # Audio steps.

    def _audio(self, now_s: float) -> SpeechStep | None:
        """The next audio step; none where nothing will be ripe before something else happens."""
        pace = self._costs.round(len(self._state.speaking))
        ready = [piece for stream in self._state.speaking for piece in self._chunk(stream, pace)]
        ripe = [piece for piece in ready if self._ripe_s(piece, pace) <= now_s]
        if not ripe:
            ripe_s = min((self._ripe_s(piece, pace) for piece in ready), default=math.inf)
            if math.isinf(ripe_s):
                return None
            return SpeechStep(kind="audio", not_before_s=ripe_s)
        # Those that would be ripe when such a step is over had better be part of it.
        end_s = now_s + self._costs.audio_s(len(ripe), _num_frames(ripe))
        ripe = [piece for piece in ready if self._ripe_s(piece, pace) <= end_s]
        ripe.sort(key=lambda piece: (piece.due_s, piece.stream.rank))
        others = set(self._state.speaking) - {piece.stream for piece in ripe}
        limit_s = min(ripe[0].due_s - self._costs.wait_s, self._next_sound_s(others))
        pieces = tuple(self._fitting(ripe, limit_s, now_s))
        num_frames = _num_frames(pieces)
        return SpeechStep(
            kind="audio",
            work=audio_work(len(pieces), num_frames),
            rows=pieces,
            due_s=pieces[0].due_s - self._costs.wait_s,
            expected_s=self._costs.audio_s(len(pieces), num_frames),
        )

    def _fitting(
        self, ripe: list[AudioPiece], limit_s: float, now_s: float
    ) -> Iterator[AudioPiece]:
        """Chunks in the order of their moments, those that can wait only up to `limit_s`."""
        if ripe[0].stream.decoder.is_alone:
            yield ripe[0]
            return
        num_rows = num_frames = 0
        alone_s = self._costs.audio_s(1, ripe[0].num_frames)
        is_lost = now_s + alone_s > limit_s
        limit_s = max(limit_s, now_s + 2 * alone_s)
        pace = self._costs.round(len(self._state.speaking))
        soon_s = now_s + is_lost * (pace.token_s + pace.audio_s)
        for piece in ripe:
            cost_s = self._costs.audio_s(num_rows + 1, num_frames + piece.num_frames)
            reserve_s = self._reserve_s(piece.stream)
            is_late = now_s + reserve_s + cost_s > limit_s and piece.due_s > soon_s
            if piece.stream.decoder.is_alone or (num_rows and is_late):
                continue
            yield piece
            num_rows, num_frames = num_rows + 1, num_frames + piece.num_frames

    def _reserve_s(self, stream: Stream) -> float:
        """Time that is kept for listeners: a stream without one gets what is beyond it."""
        if stream.request.is_live:
            return 0.0
        return RESERVE_STEPS * self._costs.round(len(self._state.speaking)).token_s

    def _chunk(self, stream: Stream, pace: SpeechRound) -> Iterator[AudioPiece]:
        """What of a stream could be decoded now: nothing, or one piece."""
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
            yield AudioPiece(stream, num_codes, num_frames, is_last, stream.playback.due_s)

    def _fixed_frames(self, stream: Stream) -> int:
        """The chunk size that an option says; 0 where none does."""
        sizes = self._options.chunk_size
        return sizes[min(stream.num_chunks, len(sizes) - 1)] if sizes else 0

    def _ripe_s(self, piece: AudioPiece, pace: SpeechRound) -> float:
        """From when on a chunk may be decoded."""
        fixed = self._fixed_frames(piece.stream)
        if piece.is_last or piece.num_frames >= (fixed or self._target(piece.stream, pace)):
            return -math.inf
        if fixed:
            return math.inf
        return piece.due_s - pace.token_s - pace.audio_s - self._costs.wait_s

    def _target(self, stream: Stream, pace: SpeechRound) -> int:
        """Frames a chunk should have: the first as few as can be, then twice as many each time."""
        if not stream.request.is_live:
            return pace.best_frames
        return min(pace.best_frames, 2 * stream.chunk_frames or pace.first_frames)

    # Token steps.

    def _token_step(self, now_s: float) -> SpeechStep | None:
        """The next token step; none where no stream could take part.

        Streams that must wait are left out whatever else there is to do; the others only if another
        stream gains by it.
        """
        needs = sorted(self._needs(now_s), key=lambda need: (need.due_s, need.stream.rank))
        if not needs:
            return None
        must, not_before_s = self._must_wait(needs, now_s)
        fill = self._fill([need for need in needs if need.segment.row.name not in must], now_s)
        limits = TokenLimits(frozenset(fill.held | must), fill.num_tokens)
        step = self._tokens.choose_step(limits)
        step = step or self._tokens.choose_step(TokenLimits(frozenset(must)))
        if step is None:
            has_time = not_before_s > now_s
            later = SpeechStep(kind="decode", not_before_s=not_before_s)
            return later if has_time else None
        num_rows, num_prompt = step.work["decode_rows"], step.work["prompt_tokens"]
        return SpeechStep(
            kind=step.kind,
            work=token_work(int(num_rows), int(num_prompt)),
            rows=step.rows,
            due_s=fill.due_s,
            tokens=step,
            expected_s=fill.cost_s(),
        )

    def _needs(self, now_s: float) -> Iterator[_Need]:
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
            ready_s, num_steps = self._ready(stream, segment, progress.num_outputs)
            due_s = stream.playback.due_s + ready_s - after_s - (num_steps - 1) * step_s
            if progress.num_left > 1:
                more_s = self._costs.token_s(num_rows, progress.num_left) - step_s
                due_s -= max(0.0, more_s)
            if not stream.playback.has_begun and due_s < now_s:
                due_s += PATIENCE * self._options.target_first_audio_s
            yield _Need(due_s, stream, segment, progress)

    def _next_sound_s(self, streams: Iterable[Stream]) -> float:
        """By when the device must be free for an audio step, lest a stream's sound stops."""
        due_s = sorted(s.playback.due_s for s in streams if s.playback.has_begun)
        if not due_s or math.isinf(due_s[0]):
            return math.inf
        num_rows = bisect_right(due_s, due_s[0] + self._costs.audio_s(len(due_s), len(due_s)))
        return due_s[0] - self._costs.audio_s(num_rows, 2 * num_rows) - self._costs.wait_s

    def _ready(self, stream: Stream, segment: SpokenSegment, num_outputs: int) -> tuple[float, int]:
        """Seconds of sound that need no more tokens, and steps until there is a frame more."""
        ready_s = 0.0
        for before in stream.segments:
            if before is not segment:
                num_frames = self._clock.num_frames(len(before.codes))
                ready_s += num_frames * self._clock.frame_s + before.spec.pause_s
                ready_s -= before.num_given / self._model.sample_rate
        lookahead = self._clock.lookahead_frames
        num_frames = max(0, self._clock.num_frames(num_outputs) - lookahead)
        ready_s += num_frames * self._clock.frame_s - segment.num_given / self._model.sample_rate
        num_steps = self._clock.num_steps(num_frames + lookahead + 1) - num_outputs
        return max(0.0, ready_s), max(1, num_steps)

    def _must_wait(self, needs: list[_Need], now_s: float) -> tuple[set[str], float]:
        """Jobs kept out by options, and until when."""
        until: dict[str, float] = {}
        if self._options.ce_delay_ms:
            until |= self._awaiting_others([need for need in needs if need.is_first])
        if self._options.max_lead_s:
            for need in needs:
                lead_s = need.due_s - self._options.max_lead_s
                if need.stream.playback.has_begun and math.isfinite(lead_s):
                    until[need.segment.row.name] = lead_s
        until = {job_id: until_s for job_id, until_s in until.items() if until_s > now_s}
        return set(until), min(until.values(), default=0.0)

    def _awaiting_others(self, first: list[_Need]) -> dict[str, float]:
        """New prompts wait for each other, until the oldest has waited enough or all fit."""
        if len(first) >= len(self._tokens.state.free_slots):
            return {}
        delay_s = self._options.ce_delay_ms / 1e3
        oldest_s = min((need.stream.job.arrival_s for need in first), default=0.0)
        return {need.segment.row.name: oldest_s + delay_s for need in first}

    def _fill(self, needs: list[_Need], now_s: float) -> _Fill:
        fill = _Fill(self._costs, limit_s=self._next_sound_s(self._state.speaking))
        ease_s = EASE_STEPS * self._costs.token_s(len(needs))
        if self._prompts_go_first(needs, now_s):
            fill.held.update(need.segment.row.name for need in needs if not need.is_prompt)
            needs = [need for need in needs if need.is_prompt]
            ease_s = math.inf
        has_newcomer = self._options.enable_prioritize_first_decode and any(
            not need.is_prompt and not need.stream.playback.has_begun for need in needs
        )
        for need in needs:
            is_guest = need.is_prompt and not need.stream.playback.has_begun
            if is_guest and has_newcomer:
                fill.held.add(need.segment.row.name)
            elif need.is_prompt:
                self._add_prompt(fill, need, now_s)
            else:
                self._add_row(fill, need, now_s, ease_s)
        return fill

    def _add_row(self, fill: _Fill, need: _Need, now_s: float, ease_s: float) -> None:
        is_far = need.due_s - now_s > ease_s
        reserve_s = self._reserve_s(need.stream)
        if is_far and now_s + reserve_s + fill.cost_s(num_rows=1) > fill.limit_s:
            fill.held.add(need.segment.row.name)
        else:
            fill.add(need, num_rows=1)

    def _add_prompt(self, fill: _Fill, need: _Need, now_s: float) -> None:
        """Admit as much of a prompt as there is time for."""
        num_left = num_tokens = need.progress.num_left
        time_s = fill.limit_s - now_s - fill.cost_s() - self._reserve_s(need.stream)
        time_s = max(0.0, time_s)
        more_s = fill.cost_s(num_tokens=num_left) - fill.cost_s()
        if more_s > time_s:
            num_tokens = int(num_left * time_s / more_s)
        if need.due_s < now_s:
            num_tokens = max(num_tokens, min(num_left, _OVERDUE_PROMPT))
        if num_tokens < min(_LEAST_PROMPT, num_left):
            fill.held.add(need.segment.row.name)
        else:
            fill.add(need, num_tokens=num_tokens)

    def _prompts_go_first(self, needs: Iterable[_Need], now_s: float) -> bool:
        """Whether so few rows run that prompts go alone, and no buffer runs dry meanwhile."""
        least = self._options.min_batch_size_tg
        if not least:
            return False
        prompts = [need for need in needs if need.is_prompt]
        rows = [need for need in needs if not need.is_prompt]
        num_tokens = sum(need.progress.num_left for need in prompts)
        due_s = min((need.due_s for need in rows), default=math.inf)
        is_safe = now_s + self._costs.token_s(0, num_tokens) + self._costs.token_s(least) <= due_s
        return bool(prompts) and len(rows) < least and is_safe


def _num_frames(pieces: Iterable[AudioPiece]) -> int:
    return sum(piece.num_frames for piece in pieces)

"""The speech scheduler's data: streams, their segments, codec rows, and detectors of loops.

Owns the data and its invariants. Decides nothing: `policy` reads it, `scheduler` changes it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from triptych.core.engine_api.frames import END_FRAME_ID, FIRST_FRAME_ID, StepCodes
from triptych.core.options.config import ScheduleOptions, SpeechOptions
from triptych.modalities.tts.plan import AudioRow, FrameClock, VoicePrompt
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.wire import SpeechDelta, SpeechFinish, SpeechRequest, SpeechSegment
from triptych.schedulers.batcher import BatchedJob, Unit
from triptych.schedulers.tokens.state import SequenceState

_BOUNDS_S = MappingProxyType({"100ms": 0.1, "300ms": 0.3, "1s": 1.0, "3s": 3.0, "10s": 10.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """The properties of a speech-token model that matter to scheduling.

    `stop_ids` end a segment. A segment's prompt is the voice's, the context and its own. The
    context is the last `num_context_steps` steps of the segment before, with that segment's words
    if all of its sound is included; `context_end_ids` mark its end. At most `ids_per_step` ids of a
    prompt end in a step. A model that `can_clone` also speaks in the voices of clips.
    """

    name: str
    clock: FrameClock
    sample_rate: int
    stop_ids: tuple[int, ...] = (END_FRAME_ID,)
    voices: Mapping[str, VoicePrompt] = field(default_factory=dict)
    num_context_steps: int = 0
    context_end_ids: tuple[int, ...] = ()
    ids_per_step: int = 1
    can_clone: bool = False


class Loop(NamedTuple):
    """A repetition: the last `num_tokens` tokens repeat every `period` tokens."""

    period: int
    num_tokens: int


class LoopDetector:
    """Finds exact cycles at the end of a stream of tokens, in time linear in its length.

    Each time a quarter of a window has come in, the Z function (Gusfield, 1997) of the reversed
    window gives for every period how far the stream's end repeats itself. The answer depends on
    the tokens alone, not on how they were pushed. A token may be anything hashable: a frame of
    several codebooks is a tuple.

    A repetition of fewer than `least_tokens` is no loop: a pause repeats the token of silence. A
    cycle is at most `longest_period` tokens, and has occurred at least `num_repeats` times.
    """

    def __init__(
        self, *, least_tokens: int, num_repeats: int = 4, longest_period: int = 64
    ) -> None:
        if least_tokens < 2 or num_repeats < 2 or longest_period < 1:
            raise ValueError("a loop needs least_tokens and num_repeats >= 2, longest_period >= 1")
        self.least_tokens = least_tokens
        self.num_repeats = num_repeats
        self.longest_period = longest_period
        size = max(least_tokens, num_repeats * longest_period)
        self._recent: deque[Hashable] = deque(maxlen=size)
        self._stride = max(1, size // 4)
        self._num_until_check = self._stride

    def push(self, token: Hashable) -> Loop | None:
        """Take one token; returns the stream's loop if a check is due and finds one."""
        self._recent.append(token)
        self._num_until_check -= 1
        if self._num_until_check:
            return None
        self._num_until_check = self._stride
        return self.find()

    def find(self) -> Loop | None:
        """The loop of the shortest period at the end of the pushed tokens."""
        repeated = z_function(list(reversed(self._recent)))
        for period in range(1, min(self.longest_period + 1, len(repeated))):
            num_tokens = period + repeated[period]
            if num_tokens >= max(self.least_tokens, self.num_repeats * period):
                return Loop(period, num_tokens)
        return None


def z_function(items: Sequence[object]) -> list[int]:
    """For each position, how many items from there on equal the sequence's beginning."""
    lengths = [len(items)] + [0] * (len(items) - 1) if items else []
    left = right = 0
    for at in range(1, len(items)):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < len(items) and items[length] == items[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths


@dataclass(slots=True, kw_only=True, eq=False)
class SpokenSegment:
    """A segment that is being spoken. Its codes are sampled by `row`, until that has ended.

    Of the sampled `codes`, `num_pushed` are decoded or being decoded; they gave `num_given`
    samples. `end` is the reason why no more codes follow. A decoder that has to restart yields
    `num_repeated` samples that were sent before. `id_ends` are the steps at which ids of the prompt
    end, at most `ids_per_step` in each, of which the first `num_sent_ends` were sent.
    """

    index: int
    spec: SpeechSegment
    loops: LoopDetector
    row: SequenceState
    num_cached_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    codes: list[StepCodes] = field(default_factory=list)
    end: SpeechFinish | None = None
    num_pushed: int = 0
    num_given: int = 0
    num_repeated: int = 0
    is_begun: bool = False
    ids_per_step: int = 1
    id_ends: list[float] = field(default_factory=list)
    num_sent_ends: int = 0

    def push_code(self, token_id: int, codes: StepCodes, place: int = -1) -> bool:
        """Take a sampled code; true if it ends the segment in a loop.

        `place` ids of the prompt are spoken before it. Repeats that are not decoded yet are
        dropped, except the first cycle.
        """
        self._end_ids(max(0, place - len(self.id_ends)))
        self.ids.append(token_id)
        self.codes.append(codes)
        loop = self.loops.push(token_id)
        if loop is None:
            return False
        self.end = "loop"
        num_kept = max(self.num_pushed, len(self.codes) - loop.num_tokens + loop.period)
        del self.ids[num_kept:], self.codes[num_kept:]
        return True

    def _end_ids(self, num_ended: int) -> None:
        """End the next ids within the last step.

        `ids_per_step` places in a step are possible, of which the last is its end: the ids have the
        means of as many different places in order. The step's end for all would be late on average.
        """
        places, start = self.ids_per_step, len(self.ids) - 1
        spacing = (places + 1) / ((num_ended + 1) * places)
        self.id_ends += (start + number * spacing for number in range(1, num_ended + 1))

    def new_ends(self) -> list[float]:
        """The steps at which further ids end, each returned once."""
        ends = self.id_ends[self.num_sent_ends :]
        self.num_sent_ends = len(self.id_ends)
        return ends


@dataclass(slots=True, eq=False)
class Stream(BatchedJob):
    """One job: a voice that speaks its segments in order.

    The first of `segments` is the one whose sound is made, the last the one whose codes are
    sampled; its sound is decoded by `decoder`. `num_chunks` and `chunk_frames` record how far its
    chunks have grown.
    """

    request: SpeechRequest
    rank: tuple[bool, int]
    playback: Playback
    voice: VoicePrompt | None
    decoder: Unit = field(default_factory=Unit)
    slot: int = -1
    segments: deque[SpokenSegment] = field(default_factory=deque)
    num_started: int = 0
    num_chunks: int = 0
    chunk_frames: int = 0
    worst_end: SpeechFinish = "stop"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether a step in flight decodes its audio."""
        return self.decoder.num_in_flight > 0

    @property
    def sampling(self) -> SpokenSegment | None:
        """The segment whose codes are being sampled."""
        return self.segments[-1] if self.segments and self.segments[-1].end is None else None

    @property
    def counts(self) -> dict[str, int]:
        """The counts of its account."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "segments": self.num_started,
            "underruns": self.playback.num_underruns,
        }

    def push_chunk(
        self, num_codes: int, num_frames: int, *, is_last: bool, has_prompt: bool
    ) -> AudioRow:
        """Pass the next codes to the decoder; `has_prompt`: a segment begins with the voice's."""
        segment = self.segments[0]
        codes = segment.codes[segment.num_pushed : segment.num_pushed + num_codes]
        is_first = not segment.is_begun
        segment.num_pushed += num_codes
        segment.is_begun = True
        if not segment.num_repeated:
            self.num_chunks += 1
            self.chunk_frames = num_frames
        return AudioRow(
            job_id=self.job.job_id,
            slot=self.slot,
            codes=tuple(codes),
            is_first=is_first,
            is_last=is_last,
            seed=self.request.sampling.seed,
            prompt=self.voice.codes if is_first and has_prompt and self.voice is not None else (),
        )

    def restart_decoder(self) -> None:
        """Decode the first segment again from its kept codes; sent samples are not sent again."""
        segment = self.segments[0]
        segment.num_pushed, segment.is_begun = 0, False
        segment.num_repeated = segment.num_given
        self.decoder.is_alone = True

    def delta(
        self,
        *,
        segment: int,
        pcm: bytes = b"",
        id_ends_s: tuple[float, ...] = (),
        segment_finish: SpeechFinish | None = None,
        finish_reason: SpeechFinish | None = None,
    ) -> SpeechDelta:
        """An output, with the token counts so far."""
        return SpeechDelta(
            segment=segment,
            pcm=pcm,
            id_ends_s=id_ends_s,
            segment_finish=segment_finish,
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
        )


class SpeechState:
    """Streams and the codec rows they hold.

    A stream that is not done is in exactly one of `waiting` (holds nothing) and `speaking` (holds
    a codec row). `leaving` streams are done, but a step in flight still decodes them.
    """

    def __init__(self, *, num_slots: int, streams: Mapping[str, Stream]) -> None:
        self.num_slots = num_slots
        self.streams = streams
        self.waiting: list[Stream] = []
        self.speaking: list[Stream] = []
        self.leaving: set[Stream] = set()
        self.free_slots = list(range(num_slots))
        self.encoding: set[str] = set()  # digests of the clips that a step in flight encodes

    def enqueue(self, stream: Stream) -> None:
        """Queue a new stream: listeners first, then in order of arrival."""
        self.waiting.append(stream)
        self.waiting.sort(key=lambda stream: stream.rank)

    def next_stream(self) -> Stream | None:
        """The stream that may begin next, if there is a codec row.

        Streams without a listener take half of the rows at most.
        """
        if not self.free_slots:
            return None
        num_idle = sum(not stream.request.is_live for stream in self.speaking)
        for stream in self._in_turn():
            has_room = stream.request.is_live or num_idle < max(1, self.num_slots // 2)
            if stream.voice is not None and has_room and not stream.is_paused:
                return stream
        return None

    def _in_turn(self) -> list[Stream]:
        """Waiting streams: listeners first, then clients with the fewest speaking streams."""
        num_speaking = Counter(stream.job.client for stream in self.speaking)
        return sorted(
            self.waiting, key=lambda stream: (stream.rank[0], num_speaking[stream.job.client])
        )

    def admit(self, stream: Stream) -> None:
        """Give a waiting stream a codec row."""
        self.waiting.remove(stream)
        self.speaking.append(stream)
        stream.slot = heapq.heappop(self.free_slots)

    def leave(self, stream: Stream) -> None:
        """Remove a stream that has ended; its row is free once no step in flight uses it."""
        if stream.slot < 0:
            self.waiting.remove(stream)
            return
        self.speaking.remove(stream)
        self.leaving.add(stream)
        self.settle(stream)

    def settle(self, stream: Stream) -> None:
        """Free the row of a stream that has ended and is not being decoded."""
        if stream in self.leaving and not stream.is_decoding:
            self.leaving.remove(stream)
            heapq.heappush(self.free_slots, stream.slot)
            stream.slot = -1

    def voiceless(self, digest: str) -> list[Stream]:
        """Streams that wait for the voice of a clip."""
        return [
            stream
            for stream in self.waiting
            if stream.voice is None
            and stream.request.clip is not None
            and stream.request.clip.digest == digest
        ]

    def next_voiceless(self) -> Stream | None:
        """The first stream whose clip is to be encoded, if there is a codec row for it.

        Otherwise a queue of clips would be encoded before speaking streams have their turn. Only
        one clip is encoded ahead, of a client with fewer speaking streams than another: a row that
        is freed goes to a stream that is ready.
        """
        speaking = Counter(stream.job.client for stream in self.speaking)
        most = max(speaking.values(), default=0)
        has_row = len(self.encoding) < len(self.free_slots)
        for stream in self._in_turn():
            is_owed = not self.encoding and speaking[stream.job.client] < most
            if not (has_row or is_owed):
                return None
            clip = stream.request.clip
            if stream.voice is None and clip is not None and clip.digest not in self.encoding:
                return stream
        return None

    def gauges(self, now_s: float) -> dict[str, float]:
        """Current numbers of streams, and of those with little audio left at their listener."""
        live = [stream.playback for stream in self.speaking if stream.playback.is_live]
        leads_s = [playback.lead_s(now_s) for playback in live if playback.has_begun]
        return {
            "speech_streams": len(self.speaking),
            "speech_streams_live": len(live),
            "speech_streams_dry": sum(lead_s < 0 for lead_s in leads_s),
            **{
                f"speech_streams_buffered_below_{name}": sum(lead_s < bound_s for lead_s in leads_s)
                for name, bound_s in _BOUNDS_S.items()
            },
        }

    def check(self) -> None:
        """Assert that every stream is in one place, and every codec row has its owner."""
        assert not set(self.waiting) & set(self.speaking)
        live = {stream.job.job_id: stream for stream in (*self.waiting, *self.speaking)}
        assert live == self.streams, "a stream is lost"
        assert not any(stream.is_done for stream in self.streams.values())
        holders = [*self.speaking, *self.leaving]
        slots = [stream.slot for stream in holders] + self.free_slots
        assert sorted(slots) == list(range(self.num_slots)), "a codec row is lost"
        assert all(stream.slot < 0 and not stream.segments for stream in self.waiting)
        assert all(stream.is_done and stream.is_decoding for stream in self.leaving)
        for stream in self.speaking:
            assert stream.segments, "a speaking stream has a segment"
            assert all(segment.end is not None for segment in list(stream.segments)[:-1])
            for segment in stream.segments:
                assert segment.num_pushed <= len(segment.codes) == len(segment.ids)


def voice_frames(voice: VoicePrompt) -> tuple[tuple[StepCodes, ...], tuple[StepCodes, ...]]:
    """The codes of the frame ids in a voice's prompt, and in its suffix: it has one of them."""
    begin, end = (any(map(_is_frame, ids)) for ids in (voice.prompt_ids, voice.suffix_ids))
    return voice.codes if begin else (), voice.codes if end else ()


def segment_prompt(
    model: SpeechModel, stream: Stream, spec: SpeechSegment, room: int
) -> tuple[tuple[int, ...], tuple[StepCodes, ...]]:
    """The prompt of the next segment of `stream`, and the codes of the frame ids in it.

    The context of the segment before takes `room` tokens at most.
    """
    voice = stream.voice or VoicePrompt()
    begin, end = voice_frames(voice)
    ids, frames = list(voice.prompt_ids), list(begin)
    room -= len(model.context_end_ids)
    num_steps = min(model.num_context_steps, room)
    if stream.segments and num_steps > 0:
        before = stream.segments[-1]
        first = max(0, len(before.ids) - num_steps)
        if not first and len(before.spec.prompt_ids) + len(before.ids) <= room:
            ids += before.spec.prompt_ids
        ids += (*before.ids[first:], *model.context_end_ids)
        pairs = zip(before.ids[first:], before.codes[first:], strict=True)
        frames += [codes for step_id, codes in pairs if _is_frame(step_id)]
    return (*ids, *spec.prompt_ids, *voice.suffix_ids), (*frames, *end)


def _is_frame(token_id: int) -> bool:
    return token_id >= FIRST_FRAME_ID


def token_options(schedule: ScheduleOptions, speech: SpeechOptions) -> ScheduleOptions:
    """The schedule options of the token steps.

    A running row has all the pages it may need and is never preempted; streams that have begun
    precede waiting ones, and live streams precede those without a listener.
    """
    num_rows = min(schedule.max_batch_size, speech.max_queue_size_tg or schedule.max_batch_size)
    return dataclasses.replace(
        schedule, max_batch_size=num_rows, max_preemptions=0, schedule_policy="priority"
    )

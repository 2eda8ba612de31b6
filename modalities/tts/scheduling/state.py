"""What the speech scheduler knows: its streams, their segments, and their codec rows.

Owns the data and its invariants. Decides nothing: `policy` reads it, `streams` and `scheduler`
change it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.core.engine_api.frames import END_FRAME_ID, FIRST_FRAME_ID, StepCodes
from triptych.modalities.tts.plan import FrameClock, VoicePrompt
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.runaway import RunawayGuard
from triptych.modalities.tts.wire import SpeechFinish, SpeechRequest, SpeechSegment
from triptych.schedulers.batcher import BatchedJob, Unit
from triptych.schedulers.tokens.state import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """What the scheduler knows of a speech-token model.

    `stop_ids` end a segment. A segment's prompt is the voice's, what was spoken last, and its own:
    of the segment before it the last `num_context_steps` steps, and its words too where all of its
    sound is among them; `context_end_ids` say that this sound is over. A model that `can_clone`
    speaks in the voices of clips too.
    """

    name: str
    clock: FrameClock
    sample_rate: int
    stop_ids: tuple[int, ...] = (END_FRAME_ID,)
    voices: Mapping[str, VoicePrompt] = field(default_factory=dict)
    num_context_steps: int = 0
    context_end_ids: tuple[int, ...] = ()
    can_clone: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class SpokenSegment:
    """A segment that is being spoken. Its codes are sampled by `row`, until that is over.

    `codes` were sampled, and of those `num_pushed` are decoded or being decoded; they gave
    `num_given` samples. `end` says why there will be no more codes. A decoder that has to begin
    again gives `num_repeated` samples that went out before.
    """

    index: int
    spec: SpeechSegment
    guard: RunawayGuard
    row: SequenceState
    num_cached_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    codes: list[StepCodes] = field(default_factory=list)
    end: SpeechFinish | None = None
    num_pushed: int = 0
    num_given: int = 0
    num_repeated: int = 0
    is_begun: bool = False


@dataclass(slots=True, eq=False)
class Stream(BatchedJob):
    """One job: a voice that speaks its segments in order.

    The first of `segments` is the one whose sound is made, the last the one whose codes are
    sampled; its sound is decoded by `decoder`. `num_chunks` and `chunk_frames` say how far its
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
        """Whether a step in flight decodes it."""
        return self.decoder.num_in_flight > 0

    @property
    def sampling(self) -> SpokenSegment | None:
        """The segment whose codes are being sampled."""
        return self.segments[-1] if self.segments and self.segments[-1].end is None else None


class SpeechState:
    """Streams and the codec rows they hold.

    A stream that is not done is in exactly one of `waiting` (holds nothing) and `speaking` (holds
    a codec row). `leaving` ones are done, but a step in flight decodes them still.
    """

    def __init__(self, *, num_slots: int, streams: Mapping[str, Stream]) -> None:
        self.num_slots = num_slots
        self.streams = streams
        self.waiting: list[Stream] = []
        self.speaking: list[Stream] = []
        self.leaving: set[Stream] = set()
        self.free_slots = list(range(num_slots))
        self.reading: set[str] = set()  # digests of the clips that a step in flight reads

    def enqueue(self, stream: Stream) -> None:
        """Let a new stream wait: listeners first, then in the order of arrival."""
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
        """Those that wait: listeners first, then clients with the fewest streams that speak."""
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
        """Take out a stream that has ended; its row is free once no step in flight uses it."""
        if stream.slot < 0:
            self.waiting.remove(stream)
            return
        self.speaking.remove(stream)
        self.leaving.add(stream)
        self.settle(stream)

    def settle(self, stream: Stream) -> None:
        """Take back the row of a stream that has ended and is not being decoded."""
        if stream in self.leaving and not stream.is_decoding:
            self.leaving.remove(stream)
            heapq.heappush(self.free_slots, stream.slot)
            stream.slot = -1

    def readers(self, digest: str) -> list[Stream]:
        """Streams that wait for the voice of a clip."""
        return [
            stream
            for stream in self.waiting
            if stream.voice is None
            and stream.request.clip is not None
            and stream.request.clip.digest == digest
        ]

    def next_reader(self) -> Stream | None:
        """The first stream whose clip is not being read, if there is a codec row for it.

        Else a queue of clips would be read before streams that speak already have their turn. Only
        one is read ahead, of a client with fewer streams that speak than another: a row that comes
        free goes to a stream that is ready.
        """
        speaking = Counter(stream.job.client for stream in self.speaking)
        most = max(speaking.values(), default=0)
        has_row = len(self.reading) < len(self.free_slots)
        for stream in self._in_turn():
            is_owed = not self.reading and speaking[stream.job.client] < most
            if not (has_row or is_owed):
                return None
            clip = stream.request.clip
            if stream.voice is None and clip is not None and clip.digest not in self.reading:
                return stream
        return None

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
            assert stream.segments, "a stream that speaks has a segment"
            assert all(segment.end is not None for segment in list(stream.segments)[:-1])
            for segment in stream.segments:
                assert segment.num_pushed <= len(segment.codes) == len(segment.ids)


def voice_frames(voice: VoicePrompt) -> tuple[StepCodes, ...]:
    """The codes of the frame ids in a voice's prompt."""
    return voice.codes if any(map(_is_frame, voice.prompt_ids)) else ()


def segment_prompt(
    model: SpeechModel, stream: Stream, spec: SpeechSegment, room: int
) -> tuple[tuple[int, ...], tuple[StepCodes, ...]]:
    """Prompt of the next segment of `stream`, and the codes of the frame ids in it.

    What was spoken last may take `room` tokens.
    """
    voice = stream.voice or VoicePrompt()
    ids, frames = list(voice.prompt_ids), list(voice_frames(voice))
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
    return (*ids, *spec.prompt_ids), tuple(frames)


def _is_frame(token_id: int) -> bool:
    return token_id >= FIRST_FRAME_ID

"""Speech that keeps ahead of its listeners: token steps and audio steps of one model.

Owns the steps of a speech-token model: which kind is proposed, and what is booked and committed.
Tokens are jobs of a `TokenScheduler` of its own, one per segment. Which rows a step has is the
policy of `speech_draft`, what becomes of them the business of `speech_streams`. Knows no tensors.

A segment's codes are drawn while those before it are still being decoded. A stream has one audio
step in flight at most, so that a decoder that failed can begin its segment anew: its codes are all
here, and what it gives a second time is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType

from triptych.core.config import ScheduleOptions, SpeechOptions
from triptych.core.errors import (
    InvalidRequest,
    Overloaded,
    RequestError,
    TriptychError,
    UnsupportedOption,
    to_info,
)
from triptych.core.job import Job
from triptych.core.kv.pages import PagePool
from triptych.core.plan import Plan, StepResult, TokenPlan, TokenStepResult
from triptych.modalities.tts.plan import (
    AudioPlan,
    AudioStepResult,
    VoicePlan,
    VoicePrompt,
    VoiceStepResult,
)
from triptych.modalities.tts.scheduling.costs import SpeechCosts
from triptych.modalities.tts.scheduling.draft import AudioDraft, AudioPiece, SpeechDrafter
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.state import SpeechModel, SpeechState, Stream
from triptych.modalities.tts.scheduling.streams import SpeechStreams
from triptych.modalities.tts.wire import SpeechRequest
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.token import TokenScheduler

_MAX_VOICES = 64  # voices of clips that are remembered
_BOUNDS_S = MappingProxyType({"100ms": 0.1, "300ms": 0.3, "1s": 1.0, "3s": 3.0, "10s": 10.0})


@dataclass(frozen=True, slots=True)
class _SpeechIntent:
    """What a proposal is for: tokens, audio, or reading the voice that a stream waits for."""

    step: Proposal | AudioDraft | Stream | None
    cost_s: float
    version: int


@dataclass(frozen=True, slots=True)
class _SpeechStep:
    """A booked step: by when it should be over, and which chunks it decodes."""

    expected_s: float
    pieces: tuple[AudioPiece, ...] = ()


class SpeechScheduler:
    """Implements `schedulers.base.Scheduler` for `SpeechRequest` jobs of one speech-token model.

    `max_length` bounds prompt and codes of a segment; `namespace` is the digest of the weights.
    """

    def __init__(
        self,
        *,
        model: SpeechModel,
        pool: PagePool,
        schedule: ScheduleOptions,
        speech: SpeechOptions,
        max_length: int,
        namespace: bytes,
    ) -> None:
        self._model = model
        self._options = speech
        self._max_waiting = schedule.max_queue_size
        self._tokens = TokenScheduler(
            model=model.name,
            pool=pool,
            options=_token_options(schedule, speech),
            max_length=max_length,
            namespace=namespace,
        )
        max_tokens = min(max_length, pool.num_pages * pool.page_size)
        self._state = SpeechState(num_slots=speech.max_streams)
        self._streams = SpeechStreams(model, speech, self._state, self._tokens, max_tokens)
        self._costs = SpeechCosts(model.clock)
        self._drafter = SpeechDrafter(model, speech, self._state, self._tokens, self._costs)
        self._voices: OrderedDict[str, VoicePrompt] = OrderedDict()
        self._steps: dict[int, _SpeechStep] = {}
        self._resumed: list[Stream] = []
        self._num_submitted = 0
        self._version = 0
        self._now_s = -math.inf

    # What others ask.

    def submit(self, job: Job) -> None:
        """Queue `job`. Raises InvalidRequest, ContextLengthExceeded or Overloaded."""
        request = job.request
        assert isinstance(request, SpeechRequest), "the API sends this model speech requests"
        assert job.job_id not in self._state.streams, "job ids are unique"
        if not request.segments:
            raise InvalidRequest("There is nothing to speak.", param="input")
        stream = Stream(
            job=job,
            request=request,
            rank=(not request.is_live, self._num_submitted),
            playback=Playback.of(
                request,
                arrival_s=job.arrival_s,
                target_s=self._options.target_first_audio_s,
            ),
            voice=self._find_voice(request),
            is_paused=job.is_paused,
        )
        self._streams.check_size(stream)
        if len(self._state.waiting) >= self._max_waiting:
            raise Overloaded("The queue is full; try again later.", retry_after_s=1.0)
        self._num_submitted += 1
        self._version += 1
        self._now_s = max(self._now_s, job.arrival_s)
        self._state.enqueue(stream)
        self._streams.let_in(self._now_s)

    def cancel(self, job_id: str) -> None:
        """End a job with a last delta that says so; an unknown or ended one is ignored."""
        stream = self._state.streams.get(job_id)
        if stream is not None:
            self._version += 1
            self._streams.cancel(stream)
            self._streams.let_in(self._now_s)

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Leave a job out of steps, or let it go on; an unknown or ended one is ignored."""
        stream = self._state.streams.get(job_id)
        if stream is None or stream.is_paused == is_paused:
            return
        self._version += 1
        stream.is_paused = stream.job.is_paused = is_paused
        if is_paused:
            stream.playback.stop(self._now_s)
        else:
            self._resumed.append(stream)
        if stream.drawing is not None:
            self._tokens.set_paused(stream.drawing.job_id, is_paused)
        self._streams.let_in(self._now_s)

    # What the loop asks.

    def propose(self, now_s: float) -> Proposal | None:
        """The step that is due first, whatever its kind.

        Audio goes first where that makes nobody late: a frame that is there should be heard.
        """
        audio = self._propose_audio(now_s)
        steps = [audio, self._propose_tokens(now_s), self._propose_voice()]
        known = [proposal for proposal in steps if proposal is not None]
        ready = [proposal for proposal in known if proposal.not_before_s <= now_s]
        if not ready:
            return min(known, key=lambda proposal: proposal.not_before_s, default=None)
        first = min(ready, key=lambda proposal: proposal.due_s)
        if audio in ready and audio is not None:
            both_s = _intent(audio).cost_s + _intent(first).cost_s
            if now_s + both_s <= first.due_s:
                return audio
        return first

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Make the plan; chooses anew if anything changed since the proposal."""
        if _intent(proposal).version != self._version:
            fresh = self.propose(now_s)
            if fresh is None or fresh.not_before_s > now_s:
                return None
            proposal = fresh
        step, expected_s = _intent(proposal).step, now_s + _intent(proposal).cost_s
        is_late = proposal.due_s < expected_s
        if is_late and not self._resumed:  # so long it waited for its turn, not for its listener
            self._costs.observe_wait(now_s - self._now_s)
        self._move_on(now_s)
        if isinstance(step, AudioDraft):
            return self._book_audio(step, step_id, expected_s)
        if isinstance(step, Stream):
            return self._book_voice(step, step_id, expected_s)
        assert step is not None, "what is booked is ready"
        plan = self._tokens.book(step, step_id, now_s)
        if plan is not None:
            self._steps[step_id] = _SpeechStep(expected_s)
        return plan

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded, and send what sound came of it."""
        self._move_on(now_s)
        step = self._steps.pop(plan.step_id)
        if not isinstance(plan, VoicePlan):
            self._costs.observe_wait(now_s - step.expected_s)
        if isinstance(plan, TokenPlan):
            self._commit_tokens(plan, result, now_s)
        elif isinstance(plan, AudioPlan):
            self._commit_audio(step, result, now_s)
        else:
            assert isinstance(plan, VoicePlan), "a plan of this scheduler"
            self._commit_voice(plan, result)
        self._streams.let_in(now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        Where it ran out of memory, token rows are tried again by halves, and decoders of audio
        begin their segments anew, each by itself.
        """
        self._move_on(now_s)
        step = self._steps.pop(plan.step_id)
        if isinstance(plan, TokenPlan):
            self._tokens.fail(plan, error, now_s)
            self._streams.take_tokens({}, now_s)
        elif isinstance(plan, AudioPlan):
            for piece in step.pieces:
                self._streams.fail_audio(piece, error, is_shared=len(step.pieces) > 1)
        else:
            assert isinstance(plan, VoicePlan), "a plan of this scheduler"
            self._state.reading.remove(plan.clip.digest)
            for stream in self._state.readers(plan.clip.digest):
                self._streams.fail(stream, to_info(error))
        self._streams.let_in(now_s)

    def stats(self) -> SchedulerStats:
        """Counts for metrics: voices, what their listeners have left, and totals."""
        tokens, counters, state = self._tokens.stats(), self._streams.counters, self._state
        live = [stream.playback for stream in state.speaking if stream.playback.is_live]
        leads_s = [playback.lead_s(self._now_s) for playback in live if playback.has_begun]
        return SchedulerStats(
            num_waiting=len(state.waiting),
            num_running=len(state.speaking),
            gauges={
                **tokens.gauges,
                "jobs_paused": sum(stream.is_paused for stream in state.streams.values()),
                "speech_streams": len(state.speaking),
                "speech_streams_live": len(live),
                "speech_streams_dry": sum(lead_s < 0 for lead_s in leads_s),
                **{
                    f"speech_streams_buffered_below_{name}": sum(
                        lead_s < bound_s for lead_s in leads_s
                    )
                    for name, bound_s in _BOUNDS_S.items()
                },
            },
            counters={
                **tokens.counters,
                "speech_frames_total": counters.num_frames,
                "speech_audio_seconds_total": counters.audio_s,
                "speech_underruns_total": counters.num_underruns,
                "speech_underrun_seconds_total": counters.underrun_s,
                "speech_late_starts_total": counters.num_late_starts,
                "speech_loops_total": counters.num_loops,
                "speech_non_finite_total": counters.num_non_finite,
            },
        )

    def check(self) -> None:
        """Assert that every page, codec row and stream is accounted for."""
        self._tokens.check()
        self._state.check()
        drawing = [stream for stream in self._state.speaking if stream.drawing is not None]
        assert len(drawing) == self._tokens.num_jobs, "a token job is lost"
        decoded = [piece.stream for step in self._steps.values() for piece in step.pieces]
        assert len(set(decoded)) == len(decoded), "a decoder is in two steps"
        holders = (*self._state.speaking, *self._state.leaving)
        assert {stream for stream in holders if stream.is_decoding} == set(decoded)

    # Proposing and booking.

    def _propose_tokens(self, now_s: float) -> Proposal | None:
        turn = self._drafter.turn(now_s)
        if turn is None:
            return None
        inner = self._tokens.propose(now_s, turn.hold) or self._tokens.propose(now_s, turn.must)
        if inner is not None:
            intent = _SpeechIntent(inner, turn.cost_s, self._version)
            return dataclasses.replace(inner, due_s=turn.due_s, intent=intent)
        if turn.not_before_s <= now_s:
            return None
        return self._proposal("decode", {}, None, not_before_s=turn.not_before_s)

    def _propose_audio(self, now_s: float) -> Proposal | None:
        draft = self._drafter.audio(now_s)
        if draft is None:
            return None
        work = {"rows": float(len(draft.pieces)), "frames": float(draft.num_frames)}
        return self._proposal("audio", work, draft, draft.cost_s, draft.due_s, draft.not_before_s)

    def _propose_voice(self) -> Proposal | None:
        stream = self._state.next_reader()
        if stream is None or stream.request.clip is None:
            return None
        clip = stream.request.clip
        work = {"samples": float(len(clip.pcm))}
        return self._proposal("voice", work, stream, 0.0, stream.playback.due_s)

    def _proposal(
        self,
        kind: str,
        work: dict[str, float],
        step: AudioDraft | Stream | None,
        cost_s: float = 0.0,
        due_s: float = math.inf,
        not_before_s: float = 0.0,
    ) -> Proposal:
        return Proposal(
            model=self._model.name,
            kind=kind,
            work=work,
            due_s=due_s,
            num_rows=len(step.pieces) if isinstance(step, AudioDraft) else 1,
            intent=_SpeechIntent(step, cost_s, self._version),
            not_before_s=not_before_s,
        )

    def _book_audio(self, draft: AudioDraft, step_id: int, expected_s: float) -> AudioPlan:
        self._steps[step_id] = _SpeechStep(expected_s, draft.pieces)
        return AudioPlan(
            step_id=step_id,
            model=self._model.name,
            kind="audio",
            rows=tuple(self._streams.begin_audio(piece) for piece in draft.pieces),
        )

    def _book_voice(self, stream: Stream, step_id: int, expected_s: float) -> VoicePlan:
        clip = stream.request.clip
        assert clip is not None, "this stream waits for a clip's voice"
        self._steps[step_id] = _SpeechStep(expected_s)
        self._state.reading.add(clip.digest)
        return VoicePlan(step_id=step_id, model=self._model.name, kind="voice", clip=clip)

    # Committing.

    def _move_on(self, now_s: float) -> None:
        """Something changes, at this moment."""
        self._version += 1
        self._now_s = max(self._now_s, now_s)
        for stream in self._resumed:
            if not stream.is_paused:
                stream.playback.go_on(now_s)
        self._resumed.clear()

    def _commit_tokens(self, plan: TokenPlan, result: StepResult, now_s: float) -> None:
        assert isinstance(result, TokenStepResult), "the token runner's result"
        num_rows = sum(not row.token_ids for row in plan.rows)
        num_prompt = plan.num_tokens - num_rows
        self._costs.observe_tokens(num_rows, num_prompt, result.elapsed_s)
        pairs = zip(plan.rows, result.rows, strict=True)
        codes = {row.job_id: row_result.codes for row, row_result in pairs}
        self._tokens.commit(plan, result, now_s)
        self._streams.take_tokens(codes, now_s)

    def _commit_audio(self, step: _SpeechStep, result: StepResult, now_s: float) -> None:
        assert isinstance(result, AudioStepResult), "the codec's result"
        num_frames = sum(piece.num_frames for piece in step.pieces)
        self._costs.observe_audio(len(step.pieces), num_frames, result.elapsed_s)
        for piece, row in zip(step.pieces, result.rows, strict=True):
            self._streams.take_audio(piece, row, now_s)

    def _commit_voice(self, plan: VoicePlan, result: StepResult) -> None:
        assert isinstance(result, VoiceStepResult), "the clip reader's result"
        digest = plan.clip.digest
        self._state.reading.remove(digest)
        self._voices[digest] = result.prompt
        if len(self._voices) > _MAX_VOICES:
            self._voices.popitem(last=False)
        for stream in self._state.readers(digest):
            stream.voice = result.prompt
            try:
                self._streams.check_size(stream)
            except RequestError as error:
                self._streams.fail(stream, to_info(error))

    def _find_voice(self, request: SpeechRequest) -> VoicePrompt | None:
        """The voice of a request; none if its clip has to be read first."""
        if request.clip is not None:
            if not self._model.can_clone:
                raise UnsupportedOption("This model imitates no recordings.", param="voice")
            voice = self._voices.get(request.clip.digest)
            if voice is not None:
                self._voices.move_to_end(request.clip.digest)
            return voice
        if request.voice and self._model.voices and request.voice not in self._model.voices:
            raise InvalidRequest("This model has no such voice.", param="voice")
        return self._model.voices.get(request.voice, VoicePrompt())


def _intent(proposal: Proposal) -> _SpeechIntent:
    intent = proposal.intent
    assert isinstance(intent, _SpeechIntent), "a proposal of this scheduler"
    return intent


def _token_options(schedule: ScheduleOptions, speech: SpeechOptions) -> ScheduleOptions:
    """Options of the inner scheduler.

    A row that speaks has all the pages it may need and never gives way; who has begun goes before
    those who wait, and listeners before those nobody listens to.
    """
    num_rows = min(schedule.max_batch_size, speech.max_queue_size_tg or schedule.max_batch_size)
    return dataclasses.replace(
        schedule,
        max_batch_size=num_rows,
        max_queue_size=speech.max_streams,
        max_preemptions=0,
        max_step_s=0.0,  # the policy here knows how long a prompt may take
        schedule_policy="priority",
    )

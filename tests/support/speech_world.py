"""A speech model that computes nothing, and what each of its jobs must sound like.

`FakeMouth` samples codes that are a hash of everything the row has seen, read back through its
pages, and decodes them with a codec whose every sample depends on all frames before it. So a page,
a code or a chunk that is lost, doubled or given to another shows in the sound, and `spoken` knows
the sound beforehand. `SpeechWorld` drives a scheduler and this runner like the engine does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from support.driver import SchedulerDriver
from support.engine_seams import Done
from triptych.core.engine_api.frames import END_FRAME_ID, FIRST_FRAME_ID, frame_id
from triptych.core.engine_api.plan import (
    Plan,
    StepCodes,
    StepResult,
    TokenPlan,
    TokenRow,
)
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.errors import RequestError, TriptychError, Unavailable
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions, SpeechOptions
from triptych.modalities.tts.plan import (
    AudioPlan,
    AudioRow,
    AudioRowResult,
    FrameClock,
    VoicePlan,
    VoicePrompt,
)
from triptych.modalities.tts.scheduling.scheduler import SpeechScheduler
from triptych.modalities.tts.scheduling.state import SpeechModel
from triptych.modalities.tts.wire import SpeechDelta, SpeechRequest, SpeechSegment, VoiceClip

MODEL = "voice"
HOP = 3
"""Samples per frame."""
LOOPS = 666
"""A prompt that ends with it is spoken as one frame for ever."""
ENDLESS = 777
"""A prompt that ends with it is spoken without an end, and without a loop."""
CLIP = VoiceClip(digest="clip", pcm=bytes(16), sample_rate=8)


def _digest(*values: int) -> int:
    data = b"".join(value.to_bytes(9, "little") for value in values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest())


def speech_model(
    *,
    steps_per_frame: int = 1,
    delay_steps: int = 0,
    lookahead_frames: int = 0,
    num_context_steps: int = 0,
    can_clone: bool = True,
    frame_s: float = 0.1,
) -> SpeechModel:
    """The scheduler's view of the fake model."""
    return SpeechModel(
        name=MODEL,
        clock=FrameClock(
            frame_s=frame_s,
            steps_per_frame=steps_per_frame,
            delay_steps=delay_steps,
            lookahead_frames=lookahead_frames,
        ),
        sample_rate=round(HOP / frame_s),
        voices={"": VoicePrompt(), "ann": _voice("ann")},
        num_context_steps=num_context_steps,
        can_clone=can_clone,
    )


def _voice(name: str) -> VoicePrompt:
    codes = tuple((ord(char), 5) for char in name)
    return VoicePrompt(prompt_ids=(9, *map(frame_id, codes)), codes=codes)


def segment(*prompt_ids: int, max_steps: int = 40, pause_s: float = 0.0) -> SpeechSegment:
    """A stretch of text."""
    return SpeechSegment(prompt_ids=prompt_ids or (1,), max_steps=max_steps, pause_s=pause_s)


def speech_request(
    *segments: SpeechSegment,
    voice: str = "",
    clip: VoiceClip | None = None,
    is_live: bool = True,
    seed: int = 0,
) -> SpeechRequest:
    """Something to say."""
    return SpeechRequest(
        segments=segments, sampling=SamplingParams(seed=seed), voice=voice, clip=clip,
        is_live=is_live,
    )  # fmt: skip


def sample(context: Sequence[int], num_prompt: int) -> tuple[int, StepCodes]:
    """The step that follows `context`: its id and codes."""
    kind = context[num_prompt - 1]
    if kind == LOOPS:
        codes = (7, 7)
    else:
        value = _digest(*context)
        if kind != ENDLESS and value % 19 == 0:
            return END_FRAME_ID, ()
        codes = (value % 1000, value // 1000 % 1000)
    return frame_id(codes), codes


@dataclass
class Codec:
    """One decoder row: frames as they come, samples as they are due."""

    clock: FrameClock
    seed: int
    state: int
    codes: list[StepCodes] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    num_frames: int = 0
    num_given: int = 0

    def push(self, codes: Sequence[StepCodes], *, is_last: bool) -> bytes:
        """Samples that are final after these codes."""
        self.codes += codes
        steps = self.clock.steps_per_frame
        while self.num_frames < self.clock.num_frames(len(self.codes)):
            first = self.clock.delay_steps + self.num_frames * steps
            frame = [value for code in self.codes[first : first + steps] for value in code]
            self.state = _digest(self.state, self.seed, *frame)
            self.samples += [(self.state >> (8 * i) & 0xFF) / 256 for i in range(HOP)]
            self.num_frames += 1
        held = 0 if is_last else self.clock.lookahead_frames * HOP
        end = max(self.num_given, len(self.samples) - held)
        given, self.num_given = self.samples[self.num_given : end], end
        return np.array(given, dtype="<f4").tobytes()


def spoken(
    request: SpeechRequest, model: SpeechModel, *, prepend: bool = False
) -> tuple[list[bytes], list[str]]:
    """The sound of each segment, and why each ended."""
    voice = _voice(request.clip.digest) if request.clip else model.voices[request.voice]
    sounds, ends, before = [], [], None
    for spec in request.segments:
        prompt = list(voice.prompt_ids)
        if before is not None and model.num_context_steps:
            old_spec, old_ids = before
            kept = old_ids[-model.num_context_steps :]
            prompt += [*(old_spec.prompt_ids if len(kept) == len(old_ids) else ()), *kept]
        context = [*prompt, *spec.prompt_ids]
        num_prompt, ids, codes, end = len(context), [], [], "length"
        while len(codes) < spec.max_steps:
            step_id, step_codes = sample(context, num_prompt)
            if step_id == END_FRAME_ID:
                end = "stop"
                break
            context.append(step_id)
            ids.append(step_id)
            codes.append(step_codes)
        codec = Codec(model.clock, request.sampling.seed, _state(voice.codes if prepend else ()))
        silence = bytes(4 * round(spec.pause_s * model.sample_rate))
        sounds.append(codec.push(codes, is_last=True) + silence)
        ends.append(end)
        before = (spec, ids)
    return sounds, ends


def _state(prompt: Sequence[StepCodes]) -> int:
    return _digest(*(value for codes in prompt for value in codes)) if prompt else 0


class FakeSpeechRunner:
    """Runs token, audio and voice plans at once, in order, as a device stream would.

    `bad_logits` and `bad_sound` are jobs whose values turn to NaN; `errors` maps the number of a
    launch to what it raises.
    """

    def __init__(
        self,
        model: SpeechModel,
        *,
        page_size: int,
        cost_s: Callable[[Plan], float] = lambda plan: 0.01,
    ) -> None:
        self.clock = model.clock
        self.page_size = page_size
        self.cost_s = cost_s
        self.bad_logits: set[str] = set()
        self.bad_sound: set[str] = set()
        self.errors: dict[int, Exception] = {}
        self.launched: list[Plan] = []
        self._cells: dict[tuple[int, int], int] = {}
        self._tables: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}
        self._num_prompt: dict[int, int] = {}
        self._codecs: dict[int, Codec] = {}

    def launch(self, plan: Plan) -> Done:
        self.launched.append(plan)
        if isinstance(plan, TokenPlan):
            for start in plan.starts:
                self._tables[start.slot] = []
                self._num_prompt[start.slot] = start.num_prompt_tokens
                num_frames = sum(step_id >= FIRST_FRAME_ID for step_id in start.history_ids)
                assert num_frames == len(start.frames), "every frame id has its codes"
            for row in plan.rows:
                self._tables[row.slot].extend(row.new_page_ids)
        if (error := self.errors.pop(len(self.launched), None)) is not None:
            if isinstance(plan, AudioPlan):
                for row in plan.rows:
                    self._codecs.pop(row.slot, None)
            return Done(error)
        return Done(self._run(plan))

    def close(self) -> None: ...

    def _run(self, plan: Plan) -> StepResult:
        elapsed_s = self.cost_s(plan)
        if isinstance(plan, TokenPlan):
            rows = tuple(self._sample(row) for row in plan.rows)
            return StepResult(elapsed_s=elapsed_s, rows=rows)
        if isinstance(plan, AudioPlan):
            assert plan.rows
            assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot comes once"
            sounds = tuple(self._decode(row) for row in plan.rows)
            return StepResult(elapsed_s=elapsed_s, rows=sounds)
        assert isinstance(plan, VoicePlan)
        prompt = _voice(plan.clip.digest)
        return StepResult(elapsed_s=elapsed_s, rows=(prompt,))

    def _sample(self, row: TokenRow) -> TokenDelta:
        table = self._tables[row.slot]
        token_ids = row.token_ids or (self._last.get(row.slot, 0),)
        for position, token_id in enumerate(token_ids, row.start):
            self._cells[self._cell(table, position)] = token_id
        if not row.is_sampled:
            return TokenDelta()
        if row.job_id.partition("#")[0] in self.bad_logits:
            return TokenDelta(token_ids=(0,), is_finite=False)
        end = row.start + row.num_tokens
        context = [self._cells.get(self._cell(table, at), 0) for at in range(end)]
        step_id, codes = sample(context, self._num_prompt[row.slot])
        self._last[row.slot] = step_id
        return TokenDelta(token_ids=(step_id,), codes=codes)

    def _cell(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self.page_size], position % self.page_size

    def _decode(self, row: AudioRow) -> AudioRowResult:
        if row.is_first:
            self._codecs[row.slot] = Codec(self.clock, row.seed, _state(row.prompt))
        assert not row.prompt or row.is_first
        pcm = self._codecs[row.slot].push(row.codes, is_last=row.is_last)
        if row.is_last:
            del self._codecs[row.slot]
        return AudioRowResult(pcm=pcm, is_finite=row.job_id not in self.bad_sound)


class SpeechWorld(SchedulerDriver):
    """The scheduler of speech, its pool and the fake runner."""

    look_s = 0.01
    refusals = (RequestError, Unavailable)

    def __init__(
        self,
        *,
        model: SpeechModel | None = None,
        num_pages: int = 200,
        page_size: int = 4,
        depth: int = 2,
        schedule: ScheduleOptions | None = None,
        **speech: object,
    ) -> None:
        self.model = model or speech_model()
        self.options = SpeechOptions(**speech)  # type: ignore[arg-type]
        self.pool = PagePool(num_pages=num_pages, page_size=page_size)
        scheduler = SpeechScheduler(
            model=self.model,
            pool=self.pool,
            schedule=schedule or ScheduleOptions(max_batch_size=8, max_batch_input_tokens=32),
            speech=self.options,
            max_length=160,
            namespace=b"fake",
        )
        runner = FakeSpeechRunner(self.model, page_size=page_size)
        super().__init__(scheduler, runner, model=MODEL, depth=depth)

    def fail_next(self, error: TriptychError) -> None:
        """The next plan to be launched raises."""
        self.runner.errors[len(self.runner.launched) + 1] = error

    def deltas(self, job_id: str) -> list[SpeechDelta]:
        return self.payloads(job_id)

    def sound(self, job_id: str) -> bytes:
        """All samples a job was sent."""
        return b"".join(delta.pcm for delta in self.deltas(job_id))

    def check_sound(self, job_id: str) -> None:
        """A job sounded as it would have alone, in order; one that ended early as far as it got."""
        prepend = self.options.prepend_prompt_speech_tokens != "never"
        sounds, ends = spoken(self.requests[job_id], self.model, prepend=prepend)
        outputs, deltas = self.outputs[job_id], self.deltas(job_id)
        assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]
        order = [delta.segment for delta in deltas]
        assert order == sorted(order), "segments come in their order"
        if outputs[-1].error is not None or deltas[-1].finish_reason == "cancelled":
            assert b"".join(sounds).startswith(self.sound(job_id))
            return
        for index, sound in enumerate(sounds):
            parts = [delta.pcm for delta in deltas if delta.segment == index]
            assert b"".join(parts) == sound, f"segment {index} of {job_id}"
        finishes = [delta.segment_finish for delta in deltas if delta.segment_finish]
        assert finishes == ends
        assert deltas[-1].finish_reason == ("length" if "length" in ends else "stop")

    def finish_all(self) -> None:
        """Run to the end, then expect every sound right and everything given back."""
        self.let_all_go_on()
        for job_id in self.jobs:
            self.check_sound(job_id)
        assert self.pool.num_leased == 0
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running) == (0, 0)

"""Kokoro as a staged model: a sentence is a unit of work, cut between pieces of the network.

Owns the size of a step: on a CPU a slice of one sentence, short enough that other work on the
device need not wait long; on a GPU a plan in two steps, the second once the host knows the
sentence's length, then the sound of several sentences of similar length at once. Knows no
deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.runtime.engine.staged_runner import advance_each
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.tts.engine.models.kokoro.layers import AWAIT, Sliced, finish
from triptych.modalities.tts.engine.models.kokoro.model import (
    MAX_BATCH_FRAMES,
    Kokoro,
    ProsodyPlan,
    SentenceRequest,
    batches,
    require_finite,
)
from triptych.modalities.tts.wire import SpeechDelta, SpeechRequest

SLICE_GMACS = 4.0
"""Multiplications in a slice, in billions: about 80 ms of a modern core."""

_SILENCE = 0.004
"""The threshold of silence, relative to a sentence's peak. The model adds near-silence to a
sentence: 0.3 s before and 0.5 s after, at least twice its own rest between sentences.
"""
_WINDOW_SAMPLES = 240
_KEPT_BEFORE, _KEPT_AFTER = 2, 6  # windows of 10 ms


@dataclass(slots=True, eq=False)
class SentenceWork:
    """A running segment of a request. `computation` ends in a plan, with all samples or without."""

    request: SpeechRequest
    unit: int
    computation: Sliced[ProsodyPlan] | Sliced[tuple[ProsodyPlan, Tensor]]
    next_stage: Stage | None
    next_gmacs: float = 0.0
    plan: ProsodyPlan | None = None


class StagedKokoro:
    """Implements `core.runtime.engine.staged_runner.StagedModel`.

    Samples are the model's without the silence at a sentence's edges; pauses scale with the speed.
    """

    def __init__(self, kokoro: Kokoro, *, slice_gmacs: float = SLICE_GMACS) -> None:
        self._kokoro = kokoro
        self._is_sliced = kokoro.model.device.type == "cpu"
        self._slice_gmacs = slice_gmacs

    def begin(self, request: SpeechRequest, unit: int) -> SentenceWork:
        """Begin a segment. Raises `InvalidRequest` or `ContextLengthExceeded`."""
        segment = request.segments[unit]
        sentence = self._kokoro.sentence(
            segment.prompt_ids,
            request.voice,
            speed=request.speed,
            seed=(request.sampling.seed + unit) % 2**63,
        )
        model = self._kokoro.model
        computation = self._synthesize(sentence) if self._is_sliced else model.plan(sentence)
        return SentenceWork(request, unit, computation, Stage("begin", len(segment.prompt_ids)))

    def advance(self, works: Sequence[SentenceWork]) -> Sequence[Any]:
        """Run a slice or a plan of each, or render the sound of all at once."""
        if works[0].plan is None:
            return advance_each(self._slice, works)
        return self._render(works)

    def _synthesize(self, sentence: SentenceRequest) -> Sliced[tuple[ProsodyPlan, Tensor]]:
        plan = yield from self._kokoro.model.plan(sentence)
        (pcm_S,) = yield from self._kokoro.model.render([plan])
        return plan, pcm_S

    def _slice(self, work: SentenceWork) -> SpeechDelta | None:
        """Run pieces of one sentence up to the slice's size; on a GPU until `AWAIT`."""
        done, next_gmacs = 0.0, work.next_gmacs
        try:
            while True:
                done += next_gmacs
                next_gmacs = next(work.computation)
                if self._is_over(done, next_gmacs):
                    break
        except StopIteration as end:
            return self._end(work, end.value)
        work.next_gmacs = next_gmacs
        num_phonemes = len(work.request.segments[work.unit].prompt_ids)
        work.next_stage = (
            Stage("slice", max(self._slice_gmacs, next_gmacs))
            if self._is_sliced
            else Stage("curves", num_phonemes)
        )
        return None

    def _is_over(self, done: float, next_gmacs: float) -> bool:
        """Whether the slice ends before the next piece."""
        if not self._is_sliced:
            return next_gmacs == AWAIT
        return done > 0 and done + next_gmacs > self._slice_gmacs

    def _end(
        self, work: SentenceWork, value: ProsodyPlan | tuple[ProsodyPlan, Tensor]
    ) -> SpeechDelta | None:
        if isinstance(value, ProsodyPlan):
            work.plan, work.next_stage = value, Stage("render", value.num_frames)
            return None
        work.next_stage = None
        plan, pcm_S = value
        return self._delta(work, plan, HostCopy(pcm_S))

    def _render(self, works: Sequence[SentenceWork]) -> list[Callable[[], SpeechDelta]]:
        plans = [work.plan for work in works if work.plan is not None]
        pending: dict[int, Callable[[], SpeechDelta]] = {}
        for batch in batches([plan.num_frames for plan in plans], MAX_BATCH_FRAMES):
            rows = finish(self._kokoro.model.render([plans[index] for index in batch]))
            for index, pcm_S in zip(batch, rows, strict=True):
                pending[index] = partial(self._delta, works[index], plans[index], HostCopy(pcm_S))
        for work in works:
            work.next_stage = None
        return [pending[index] for index in range(len(works))]

    def _delta(self, work: SentenceWork, plan: ProsodyPlan, pcm: HostCopy) -> SpeechDelta:
        """A sentence's sound and the silence after it. Raises `NonFinite`."""
        segment = work.request.segments[work.unit]
        sound_S = require_finite(pcm.get()).numpy()
        kept = kept_sound(sound_S)
        pause_s = segment.pause_s / work.request.speed
        silence_S = np.zeros(round(pause_s * self._kokoro.sample_rate), np.float32)
        is_last = work.unit == len(work.request.segments) - 1
        return SpeechDelta(
            segment=work.unit,
            pcm=np.concatenate((sound_S[kept], silence_S)).astype("<f4").tobytes(),
            id_ends_s=self._ends_s(plan, kept),
            segment_finish="stop",
            finish_reason="stop" if is_last else None,
            num_output_tokens=len(sound_S) // self._kokoro.config.generator.samples_per_frame,
        )

    def _ends_s(self, plan: ProsodyPlan, kept: slice) -> tuple[float, ...]:
        """The end of each phoneme, in seconds from the first sample that is kept."""
        rate, frame = self._kokoro.sample_rate, self._kokoro.config.generator.samples_per_frame
        ends_T = (np.cumsum(plan.durations)[1:-1] * frame - kept.start) / rate
        return tuple(ends_T.tolist())


def kept_sound(pcm_S: NDArray[np.float32]) -> slice:
    """The samples without the silence at a sentence's edges, but for a short margin.

    Each segment states its own pause, and the first sound should come as early as possible.
    """
    windows_WS = pcm_S[: len(pcm_S) // _WINDOW_SAMPLES * _WINDOW_SAMPLES].reshape(
        -1, _WINDOW_SAMPLES
    )
    peaks_W = np.abs(windows_WS).max(axis=1)
    loud = np.flatnonzero(peaks_W > _SILENCE * peaks_W.max(initial=0.0))
    if not len(loud):
        return slice(0, len(pcm_S))
    first = max(0, int(loud[0]) - _KEPT_BEFORE) * _WINDOW_SAMPLES
    last = (int(loud[-1]) + 1 + _KEPT_AFTER) * _WINDOW_SAMPLES
    return slice(first, min(last, len(pcm_S)))

"""Runs the plans of a speech-token model on the device: tokens, audio, and voices.

Owns the dispatch, audio steps, and the encoding of clips. Token steps are
`core.runtime.engine.token_runner`'s. Knows no policy and no family.

Shapes: N steps, K codes of a step, B rows, Q codebooks, F codec frames, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from triptych.core.engine_api.frames import StepCodes
from triptych.core.engine_api.plan import PendingStep, Plan, StepResult, TokenPlan
from triptych.core.errors import InvalidRequest, OutOfMemory
from triptych.core.process.content_cache import ContentCache
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.tts.engine.codecs.protocol import DecodedAudio, SpeechCodec
from triptych.modalities.tts.engine.codecs.window import WindowDecoder
from triptych.modalities.tts.engine.models.blueprint import Codes, SpeechTraits
from triptych.modalities.tts.plan import (
    AudioPlan,
    AudioRow,
    AudioRowResult,
    VoicePlan,
    VoicePrompt,
)
from triptych.modalities.tts.wire import VoiceClip


class SpeechRunner:
    """A `Runner` for the plans of `modalities.tts.scheduling.scheduler`.

    Audio and voices run on their own stream, apart from the tokens.
    """

    def __init__(
        self, tokens: TokenRunner, audio: AudioSteps, voices: VoiceReader, device: torch.device
    ) -> None:
        self._tokens = tokens
        self._audio = audio
        self._voices = voices
        self._stream = StepStream(device)

    def launch(self, plan: Plan) -> PendingStep:
        """Start `plan`; on a CPU the work is done on return. Raises `OutOfMemory`."""
        if isinstance(plan, TokenPlan):
            return self._tokens.launch(plan)
        try:
            with torch.inference_mode(), self._stream.current():
                if isinstance(plan, AudioPlan):
                    return self._audio.launch(plan)
                assert isinstance(plan, VoicePlan), "a plan of the speech scheduler"
                return self._voices.launch(plan)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The step did not fit in device memory.") from error

    def close(self) -> None:
        """Release models, caches and codec state. No launches after this."""
        self._tokens.close()
        self._voices.close()
        del self._audio, self._voices


class AudioSteps:
    """Decodes step codes in the codec's rows.

    Holds per row, on the host: the steps of incomplete frames, and how many samples of the voice's
    own sound remain to be discarded.
    """

    def __init__(
        self,
        codec: SpeechCodec,
        traits: SpeechTraits,
        frames: Callable[[Codes], Codes],
        device: torch.device,
    ) -> None:
        self._decoder = codec.decoder
        self._codebook_size = codec.codebook_size
        self._traits = traits
        self._frames = frames
        self._device = device
        self._steps: dict[int, list[StepCodes]] = {}
        self._num_skipped: dict[int, int] = {}

    def launch(self, plan: AudioPlan) -> PendingAudio:
        """Start the step: new rows, the frames that are complete, and the ends of segments."""
        first = [row for row in plan.rows if row.is_first]
        if first:
            self._begin(first)
        parts: list[list[_RowSamples]] = [[] for _ in plan.rows]
        whole = {index: self._take(row) for index, row in enumerate(plan.rows)}
        unknown = {index for index, codes_QF in whole.items() if self._is_unknown(codes_QF)}
        known = {index: codes_QF for index, codes_QF in whole.items() if index not in unknown}
        self._decode({index: codes for index, codes in known.items() if codes.size}, plan, parts)
        last = [index for index, row in enumerate(plan.rows) if row.is_last]
        if last:
            slots = [plan.rows[index].slot for index in last]
            self._add(last, slots, self._decoder.flush(slots), parts)
        return PendingAudio(parts, unknown, end_of_work(self._device))

    def _is_unknown(self, codes_QF: Codes) -> bool:
        """Whether a code is out of the codec's range: looking it up would fail the whole step."""
        return bool(((codes_QF < 0) | (codes_QF >= self._codebook_size)).any())

    def _begin(self, rows: Sequence[AudioRow]) -> None:
        slots = [row.slot for row in rows]
        self._decoder.init_state(slots, seeds=[row.seed for row in rows])
        self._steps.update({slot: [] for slot in slots})
        self._num_skipped.update(dict.fromkeys(slots, 0))
        for row in rows:
            if row.prompt:
                self._prime(row.slot, self._frames(_steps_array(row.prompt)))

    def _prime(self, slot: int, codes_QF: Codes) -> None:
        """Run a row's decoder over a voice's frames; their sound is discarded."""
        codes = to_device(torch.from_numpy(codes_QF), self._device)
        if isinstance(self._decoder, WindowDecoder):
            self._decoder.prime(slot, codes)
            return
        audio = self._decoder.push(codes[None], [slot])
        num_samples = codes_QF.shape[1] * self._decoder.hop
        self._num_skipped[slot] = num_samples - (audio.stops[0] - audio.starts[0])

    def _take(self, row: AudioRow) -> Codes:
        """The frames completed by the row's new steps: `codes_QF`."""
        steps = [*self._steps[row.slot], *row.codes]
        num_frames = self._traits.num_frames(len(steps))
        self._steps[row.slot] = steps[num_frames * self._traits.steps_per_frame :]
        return self._frames(_steps_array(steps)) if num_frames else np.zeros((0, 0), np.int64)

    def _decode(
        self, whole: dict[int, Codes], plan: AudioPlan, parts: Sequence[list[_RowSamples]]
    ) -> None:
        if not whole:
            return
        num_valid = [codes_QF.shape[1] for codes_QF in whole.values()]
        num_codebooks = len(next(iter(whole.values())))
        codes_BQF = np.zeros((len(whole), num_codebooks, max(num_valid)), np.int64)
        for padded_QF, codes_QF in zip(codes_BQF, whole.values(), strict=True):
            padded_QF[:, : codes_QF.shape[1]] = codes_QF
        slots = [plan.rows[index].slot for index in whole]
        codes = to_device(torch.from_numpy(codes_BQF), self._device)
        self._add(list(whole), slots, self._decoder.push(codes, slots, num_valid), parts)

    def _add(
        self,
        indexes: Sequence[int],
        slots: Sequence[int],
        audio: DecodedAudio,
        parts: Sequence[list[_RowSamples]],
    ) -> None:
        """Record where each row's samples will be, without the voice's own."""
        pcm = HostCopy(audio.pcm_BS.float())
        for at, (index, slot) in enumerate(zip(indexes, slots, strict=True)):
            start, stop = audio.starts[at], audio.stops[at]
            num_skipped = min(self._num_skipped[slot], stop - start)
            self._num_skipped[slot] -= num_skipped
            parts[index].append(_RowSamples(pcm, at, start + num_skipped, stop))


@dataclass(frozen=True, slots=True)
class _RowSamples:
    """Samples of one row whose copy to the host is under way."""

    pcm: HostCopy
    row: int
    start: int
    stop: int

    def samples(self) -> np.ndarray:
        return self.pcm.get()[self.row, self.start : self.stop].numpy()


@dataclass(frozen=True, slots=True)
class PendingAudio:
    """Implements `core.engine_api.plan.PendingStep`. Rows of `unknown` codes have no sound."""

    parts: Sequence[Sequence[_RowSamples]]
    unknown: Collection[int]
    wait: Callable[[], None]

    def result(self) -> StepResult:
        """Wait for the samples."""
        self.wait()
        rows = tuple(
            AudioRowResult(is_finite=False) if index in self.unknown else _audio_row(parts)
            for index, parts in enumerate(self.parts)
        )
        return StepResult(rows=rows)


def _audio_row(parts: Sequence[_RowSamples]) -> AudioRowResult:
    if not parts:
        return AudioRowResult()
    samples_S = np.concatenate([part.samples() for part in parts])
    if not np.isfinite(samples_S).all():
        return AudioRowResult(is_finite=False)
    return AudioRowResult(pcm=samples_S.astype("<f4", copy=False).tobytes())


def _steps_array(steps: Sequence[StepCodes]) -> Codes:
    return np.array(steps, dtype=np.int64)


class VoiceReader:
    """Encodes the voices of clips, and caches their codes by the clips' digests."""

    def __init__(
        self,
        codec: SpeechCodec,
        voice_prompt: Callable[[VoiceClip, Codes], VoicePrompt],
        cache: ContentCache[Codes],
        device: torch.device,
    ) -> None:
        self._codec = codec
        self._voice_prompt = voice_prompt
        self._cache = cache
        self._device = device

    def launch(self, plan: VoicePlan) -> PendingVoice:
        """Start encoding, unless the clip is known. Raises `InvalidRequest` without an encoder."""
        codes_QF = self._cache.acquire(plan.clip.digest)
        if codes_QF is not None:
            self._cache.release(
                plan.clip.digest
            )  # here, because a failed step never calls `finish`
            codes = HostCopy(torch.from_numpy(codes_QF))
        else:
            codes = HostCopy(self._encode(plan.clip))
        wait = end_of_work(self._device)
        return PendingVoice(self, plan.clip, codes, wait, is_known=codes_QF is not None)

    def close(self) -> None:
        """Clear the cache of voices."""
        self._cache.clear()

    def finish(self, clip: VoiceClip, codes_QF: Codes, *, is_known: bool) -> VoicePrompt:
        """The prompt of an encoded clip; caches its codes."""
        if not is_known:
            codes_QF = self._cache.insert(clip.digest, codes_QF, codes_QF.nbytes)
            self._cache.release(clip.digest)
        return self._voice_prompt(clip, codes_QF)

    def _encode(self, clip: VoiceClip) -> torch.Tensor:
        if self._codec.encode is None:
            raise InvalidRequest("This model cannot imitate recordings.", param="voice")
        pcm_S = to_device(torch.frombuffer(bytearray(clip.pcm), dtype=torch.float32), self._device)
        rate = self._codec.decoder.sample_rate
        if clip.sample_rate != rate:
            import torchaudio  # slow to import, and rarely needed

            pcm_S = torchaudio.functional.resample(pcm_S, clip.sample_rate, rate)
        return self._codec.encode(pcm_S)


@dataclass(frozen=True, slots=True)
class PendingVoice:
    """Implements `core.engine_api.plan.PendingStep` for a clip's codes."""

    reader: VoiceReader
    clip: VoiceClip
    codes: HostCopy
    wait: Callable[[], None]
    is_known: bool

    def result(self) -> StepResult:
        """Wait for the codes."""
        self.wait()
        codes_QF = self.codes.get().numpy()
        prompt = self.reader.finish(self.clip, codes_QF, is_known=self.is_known)
        return StepResult(rows=(prompt,))

"""Plans and results of the steps that only speech has: decoding audio, and encoding a voice.

Owns the hand-over between the speech scheduler and the runners of speech-token models. Plain data
without tensors, like `core.engine_api.plan`. Knows neither policy nor codecs.

A *step code* is the output of one token step of a speech model: a tuple of ints, one id or a column
of codes. The runner's assembler turns step codes into codec frames; the scheduler counts them with
a `FrameClock`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.engine_api.frames import StepCodes
from triptych.core.engine_api.plan import Plan
from triptych.modalities.tts.wire import SAMPLE_BYTES, VoiceClip


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePattern:
    """How token steps become codec frames: `steps_per_frame` steps make one.

    With a delay pattern, each frame is complete `delay_steps` steps later.
    """

    steps_per_frame: int = 1
    delay_steps: int = 0

    def num_frames(self, num_steps: int) -> int:
        """Complete frames in the first `num_steps` steps of a segment."""
        return max(0, num_steps - self.delay_steps) // self.steps_per_frame

    def num_steps(self, num_frames: int) -> int:
        """Fewest steps of a segment that hold `num_frames` complete frames; 0 for none."""
        return self.delay_steps + num_frames * self.steps_per_frame if num_frames > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameClock(FramePattern):
    """How token steps become audio: frames of `frame_s`.

    A frame's sound is returned `lookahead_frames` frames later (codecs that read ahead) or when the
    segment ends.
    """

    frame_s: float
    lookahead_frames: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of audio per token step."""
        return self.frame_s / self.steps_per_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRow:
    """One row of an audio step: the next step codes of a job's current segment.

    `slot` is the codec row; it stays with the job from its first row to its end. The first row of a
    segment `is_first` (the codec row is reset), the last one `is_last` (the decoder's delayed sound
    is flushed); one row may be both, with `codes` that may be empty. `prompt`, set only where
    `is_first`, holds step codes of the voice: the decoder runs over them, and their sound is
    discarded. `seed` keys the noise of codecs that add some.
    """

    job_id: str
    slot: int
    codes: tuple[StepCodes, ...] = ()
    is_first: bool = False
    is_last: bool = False
    seed: int = 0
    prompt: tuple[StepCodes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPlan(Plan):
    """A step of the codec. Each slot occurs at most once."""

    rows: tuple[AudioRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRowResult:
    """Little-endian float32 samples of one row.

    `is_finite` is false if they held NaN, or if a code is outside the codec's range.
    """

    pcm: bytes = b""
    is_finite: bool = True

    @property
    def num_samples(self) -> int:
        """Samples in `pcm`."""
        return len(self.pcm) // SAMPLE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class VoicePrompt:
    """A voice as a speech-token model's prompt.

    `prompt_ids` begin every prompt, `suffix_ids` end it (ids of words, and frame ids of sound);
    `codes` are the step codes of that sound, over which decoders run first.
    """

    prompt_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    codes: tuple[StepCodes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VoicePlan(Plan):
    """A step that encodes the voice of a clip."""

    clip: VoiceClip

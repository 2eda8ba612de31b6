"""The messages of speech between API and engine: requests, and their deltas.

Owns the wire types of every model that makes sound. Text never crosses: the API process
turns it into segments of ids, and knows which words each segment speaks. Sound crosses as
little-endian float32 samples, one channel, at the model's rate.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.engine_api.sampling_params import SamplingParams

SAMPLE_BYTES = 4
"""Bytes of a sample on the wire: float32, one channel."""
SpeechFinish = Literal["stop", "length", "loop", "cancelled"]
"""Why a segment ended: spoken to its end, out of bounds, caught repeating itself, or cancelled."""


class SpeechSegment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of text spoken in one go.

    `prompt_ids` are phonemes, or the prompt of a speech-token model after its voice. `max_steps`
    bounds what a runaway may cost: steps of a token model (0: a model that makes a sentence at
    once needs no bound). `pause_s` of silence follow.
    """

    prompt_ids: tuple[int, ...]
    max_steps: int = 0
    pause_s: float = 0.0


class VoiceClip(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Recorded speech to be imitated: its sound, the ids of its words, and a name for its content.

    `digest` is the SHA-256 of everything else: what the engine derives from a clip is kept under
    that name.
    """

    digest: str
    pcm: bytes
    sample_rate: int
    prompt_ids: tuple[int, ...] = ()


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="speak"):
    """Everything one voice will say, in order.

    `voice` is a name the model knows, `clip` a voice of the caller's instead. A request that
    `is_live` is listened to while it is made and has deadlines; one that is not (a file) takes
    what the device has left. `speed` is for models that take it themselves.
    """

    segments: tuple[SpeechSegment, ...]
    sampling: SamplingParams
    voice: str = ""
    clip: VoiceClip | None = None
    speed: float = 1.0
    is_live: bool = True
    lead_s: float = 0.0
    tenant: str = ""


class SpeechDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="speech"):
    """What one step added to the sound of a request.

    Deltas come in the order of their segments. The last of a segment carries `segment_finish`, the
    last of the job `finish_reason` too. Counts are cumulative for the job.
    """

    segment: int = 0
    pcm: bytes = b""
    segment_finish: SpeechFinish | None = None
    finish_reason: SpeechFinish | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

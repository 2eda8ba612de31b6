"""Speech messages between API and engine: requests and their deltas.

Owns the wire types of all speech models. Text never crosses: the API process turns it into segments
of ids and keeps track of the words of each segment. Sound crosses as little-endian float32 samples,
one channel, at the model's rate.
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
    """A stretch of text that is spoken at once.

    `prompt_ids` are phonemes, or the prompt of a speech-token model after its voice. `max_steps`
    limits the steps of a token model that does not stop (0: a model that generates whole sentences
    needs no limit). `pause_s` of silence follow.
    """

    prompt_ids: tuple[int, ...]
    max_steps: int = 0
    pause_s: float = 0.0


class VoiceClip(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Recorded speech to imitate: its samples and the ids of its words.

    `digest` is the SHA-256 of all other fields, and the cache key for data that the engine derives.
    """

    digest: str
    pcm: bytes
    sample_rate: int
    prompt_ids: tuple[int, ...] = ()


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="speak"):
    """The segments that one voice speaks, in order.

    `voice` is the name of a built-in voice, `clip` replaces it by a recording. A request that
    `is_live` is played while it is generated and has deadlines; any other (a file) uses spare
    capacity. `speed` is for models that support it themselves.
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
    """The sound that one step added to a request.

    Deltas come in the order of their segments. The last of a segment carries `segment_finish`, the
    last of the job also carries `finish_reason`. Counts are cumulative for the job.

    `id_ends_s` are the ends of the next of the segment's `prompt_ids`, in order, in seconds from
    the start of its sound, by the model's alignment: they may lie in silence that was cut. Those
    that have none when the segment ends, end with it. Models that do not know them send none.
    """

    segment: int = 0
    pcm: bytes = b""
    id_ends_s: tuple[float, ...] = ()
    segment_finish: SpeechFinish | None = None
    finish_reason: SpeechFinish | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

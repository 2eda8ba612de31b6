"""The words recognition models speak between API and engine: requests, and their deltas.

Owns the wire types of every model that writes speech down. Text never crosses: tokens do, with
their times. Sound crosses as little-endian float32 samples, one channel, at the model's rate.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class TranscribeRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="hear"):
    """Speech to be written down: samples at the model's rate, and how to write.

    `prompt_ids` are words that came before, `language` is empty where the model knows but one or
    detects it. `temperature` 0 takes the likeliest token. Where `is_last` is false more sound
    follows in another request: what does not fill a window any more is left to that.
    """

    pcm: bytes
    language: str = ""
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    has_word_times: bool = False
    is_last: bool = True
    tenant: str = ""


class TranscriptToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of a transcript: when it is spoken (seconds, -1 where unknown), its probability."""

    token_id: int
    start_s: float = -1.0
    end_s: float = -1.0
    logprob: float = 0.0


class TimedTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of a transcript between two timestamps."""

    start_s: float
    end_s: float
    tokens: tuple[TranscriptToken, ...]
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    compression_ratio: float = 0.0
    temperature: float = 0.0


class TranscribeDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="heard"):
    """What one step added to a transcript: the segments of a window, once nothing changes them.

    `heard_s` counts from the beginning of the sound; times of segments and tokens do, too.
    """

    segments: tuple[TimedTokens, ...] = ()
    language: str = ""
    heard_s: float = 0.0
    finish_reason: Literal["stop", "cancelled"] | None = None

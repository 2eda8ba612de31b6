"""The messages of speech recognition between API and engine: requests, and their deltas.

Owns the wire types of every model that transcribes speech. No text is sent, only tokens with their
times. Audio is sent as little-endian float32 samples, mono, at the model's rate.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class TranscribeRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="transcribe"
):
    """Speech to transcribe: samples at the model's rate, and options.

    `prompt_ids` are the tokens of earlier text; `language` is empty for a model with only one, or
    to detect it. `temperature` 0 takes the likeliest token. If `is_last` is false more audio
    follows in another request, and a last incomplete window is left to that. `expected` are the
    segments of an earlier pass over the same sound: a hint that saves time.
    """

    pcm: bytes
    language: str = ""
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    has_word_times: bool = False
    is_last: bool = True
    expected: tuple[TimedTokens, ...] = ()
    tenant: str = ""


class TranscriptToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of a transcript: its times (seconds, -1 if unknown) and log-probability."""

    token_id: int
    start_s: float = -1.0
    end_s: float = -1.0
    logprob: float = 0.0


class TimedTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of a transcript between two timestamps."""

    start_s: float
    end_s: float
    tokens: tuple[TranscriptToken, ...]
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    compression_ratio: float = 0.0
    temperature: float = 0.0


class TranscribeDelta(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="transcript"
):
    """The output of one step: the final segments of a window.

    `heard_s` and the times of segments and tokens count from the start of the request's audio.
    """

    segments: tuple[TimedTokens, ...] = ()
    language: str = ""
    heard_s: float = 0.0
    finish_reason: Literal["stop", "cancelled"] | None = None

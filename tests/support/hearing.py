"""Speech that the listening side can be tried on without a model: a tone is a voice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import numpy as np

from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.asr.api.service import AsrService, TranscribeCall
from triptych.modalities.asr.api.transcript import TranscriptDelta, TranscriptSegment
from triptych.modalities.asr.traits import Traits
from triptych.modalities.talk.hearing.voice_activity import (
    CONTEXT,
    FRAME,
    Floats,
    VoiceNetwork,
    VoiceState,
)
from triptych.modalities.talk.ports import HEARING_RATE


def sound(*parts: tuple[bool, float]) -> Pcm:
    """Samples: speech or silence, each for some seconds."""
    pieces = [np.full(round(seconds * HEARING_RATE), 0.5 * is_loud) for is_loud, seconds in parts]
    return np.concatenate(pieces).astype(np.float32)


class LoudnessNetwork(VoiceNetwork):
    """Frames with sound are speech."""

    def __init__(self) -> None:
        pass

    def probabilities(self, state: VoiceState, pcm_S: Pcm) -> Floats:
        found: Floats = np.abs(pcm_S.reshape(-1, FRAME)).max(1)
        return np.where(found > 0.1, 0.9, 0.05).astype(np.float32)


def random_weights(seed: int = 0) -> dict[str, Floats]:
    """Weights of the network's shapes, lively enough that probabilities differ."""
    rng = np.random.default_rng(seed)
    shapes = {
        "stft.forward_basis_buffer": (258, 1, 256),
        "decoder.rnn.weight_ih": (512, 128),
        "decoder.rnn.weight_hh": (512, 128),
        "decoder.rnn.bias_ih": (512,),
        "decoder.rnn.bias_hh": (512,),
        "decoder.decoder.2.weight": (1, 128, 1),
        "decoder.decoder.2.bias": (1,),
    }
    for n, shape in enumerate([(128, 129, 3), (64, 128, 3), (64, 64, 3), (128, 64, 3)]):
        shapes[f"encoder.{n}.reparam_conv.weight"] = shape
        shapes[f"encoder.{n}.reparam_conv.bias"] = shape[:1]
    return {
        name: rng.normal(0, 2.0 * np.prod(shape[1:]) ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def context_of(pcm_S: Pcm) -> Pcm:
    """The samples with the silence before them."""
    return np.pad(pcm_S, (CONTEXT, 0))


class ScriptedRecognizer:
    """Answers each pass with `write(seconds of sound)`, once `gate` is set.

    `passes` are the seconds of sound of each pass, `ended` those that were not cancelled.
    """

    def __init__(self, write: Callable[[float], str], *, is_open: bool = True) -> None:
        self.write = write
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.passes: list[float] = []
        self.ended: list[float] = []
        self.prompts: list[str] = []
        self.ids: list[str] = []
        self.error: Exception | None = None

    @property
    def service(self) -> AsrService:
        """As the class that callers use."""
        return cast("AsrService", self)

    def check(self, call: TranscribeCall) -> Any:
        return self

    traits = Traits(family="scripted", continues_text=True)

    async def transcribe(
        self, call: TranscribeCall, pcm_S: Pcm
    ) -> AsyncGenerator[TranscriptDelta, None]:
        seconds = len(pcm_S) / HEARING_RATE
        self.passes.append(seconds)
        self.prompts.append(call.prompt)
        self.ids.append(call.caller.call_id)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.ended.append(seconds)
        text = self.write(seconds)
        words = text.split()
        segments = tuple(
            _segment(n, f" {word}", seconds * (n + 1) / len(words)) for n, word in enumerate(words)
        )
        yield TranscriptDelta(
            text=text, segments=segments, language="en", heard_s=seconds, duration_s=seconds
        )


def _segment(index: int, text: str, end_s: float) -> TranscriptSegment:
    return TranscriptSegment(
        index=index,
        start_s=0.0,
        end_s=end_s,
        text=text,
        token_ids=(),
        tokens=(),
        words=(),
        avg_logprob=0.0,
        no_speech_prob=0.0,
        compression_ratio=1.0,
        temperature=0.0,
    )

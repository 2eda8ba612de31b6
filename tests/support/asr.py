"""A recognizer small enough for tests: random weights, bytes for words, seconds for windows."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI
from tokenizers import Tokenizer
from transformers import WhisperConfig, WhisperForConditionalGeneration

from support.http import READY
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.http.app import create_app
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.resampling import Pcm
from triptych.core.options.config import Config, ScheduleOptions, ServerOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.asr.api.routes import asr_router
from triptych.modalities.asr.api.service import AsrService
from triptych.modalities.asr.api.transcript import RecognizerText
from triptych.modalities.asr.engine.whisper.convert import ranked_tokenizer
from triptych.modalities.asr.engine.whisper.recognizer import TranscriptionJob
from triptych.modalities.asr.spec import SAMPLE_RATE, WhisperSpec
from triptych.modalities.asr.wire import (
    TimedTokens,
    TranscribeDelta,
    TranscribeRequest,
    TranscriptToken,
)
from triptych.schedulers.admission import Admission

WINDOW_S = 3
LIVELINESS = 4
END, START, ENGLISH, NO_TIMESTAMPS = 256, 257, 258, 362
TRANSLATE, TRANSCRIBE = 357, 358
FIRST_TIME = NO_TIMESTAMPS + 1
CONFIG: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": FIRST_TIME + 50 * WINDOW_S + 1,
    "num_mel_bins": 20,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_source_positions": 50 * WINDOW_S,
    "max_target_positions": 64,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "tie_word_embeddings": True,
    "median_filter_width": 7,
}
NO_SIZES: Mapping[str, int] = MappingProxyType({})
GENERATION: dict[str, Any] = {
    "alignment_heads": [[1, 0], [1, 1]],
    "begin_suppress_tokens": [32, END],
    "bos_token_id": END,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "is_multilingual": False,
    "max_initial_timestamp_index": 50,
    "max_length": 64,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "pad_token_id": END,
    "prev_sot_token_id": 360,
    "return_timestamps": False,
    "suppress_tokens": [1, 2, 7, START, 359, 360, 361],
}
MULTILINGUAL: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|zh|>": 259, "<|de|>": 260},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
}


def tokenizer() -> Tokenizer:
    """A token for each byte, then Whisper's own."""
    lines = (base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256))
    return ranked_tokenizer(b"\n".join(lines))


def spec(**generation: Any) -> WhisperSpec:
    """The spec of the small model."""
    return WhisperSpec.of(CONFIG, GENERATION | generation)


def random_network(seed: int = 0, **sizes: int) -> WhisperForConditionalGeneration:
    """Weights lively enough that it says something else at every step."""
    network = WhisperForConditionalGeneration(WhisperConfig.from_dict(CONFIG | sizes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():
            spread = 0.2 if value.ndim == 1 else 1.5 * value[0].numel() ** -0.5
            value.copy_(spread * torch.randn(value.shape, generator=generator))
        # All times together are rarely likelier than the likeliest text.
        network.model.decoder.embed_tokens.weight[:END].mul_(LIVELINESS)
        network.model.decoder.embed_tokens.weight[END].mul_(LIVELINESS)
    return network


def write_folder(
    folder: Path, *, seed: int = 0, sizes: Mapping[str, int] = NO_SIZES, **generation: Any
) -> ResolvedModel:
    """The small model as a folder that transformers reads, too; `sizes` change `CONFIG`."""
    random_network(seed, **sizes).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | generation))
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(sizes)))
    tokenizer().save(str(folder / "tokenizer.json"))
    return ResolvedModel(name="ears", reference="ears", folder=str(folder), digest="ab" * 32)


def noise(seconds: float, seed: int = 0) -> Pcm:
    """Sound that changes all the time."""
    generator = np.random.default_rng(seed)
    pitch = np.cumsum(generator.normal(0, 0.02, round(seconds * SAMPLE_RATE))) + 0.1
    sound = 0.3 * np.sin(np.cumsum(pitch)) + 0.05 * generator.normal(size=len(pitch))
    return sound.astype(np.float32)


def timed_tokens(
    text: str, start_s: float, end_s: float, *, has_times: bool = False
) -> TimedTokens:
    """A segment that spells `text` in the vocabulary of bytes, evenly spread over its time."""
    data = text.encode()
    step_s = (end_s - start_s) / max(len(data), 1)
    tokens = tuple(
        TranscriptToken(byte, start_s + n * step_s, start_s + (n + 1) * step_s, -0.25)
        if has_times
        else TranscriptToken(byte, logprob=-0.25)
        for n, byte in enumerate(data)
    )
    return TimedTokens(
        start_s=start_s,
        end_s=end_s,
        tokens=tokens,
        avg_logprob=-0.25,
        no_speech_prob=0.01,
        compression_ratio=0.8,
    )


def run(job: TranscriptionJob) -> list[TranscribeDelta]:
    """All deltas of a job, stage by stage."""
    deltas = []
    with torch.inference_mode():
        while job.next_stage is not None:
            if (delta := job.advance()) is not None:
                deltas.append(delta)
    return deltas


def transcribe_request(pcm_S: Pcm, **fields: Any) -> TranscribeRequest:
    """A request for `pcm_S`."""
    return TranscribeRequest(pcm=pcm_S.astype("<f4").tobytes(), **fields)


def text_ids(deltas: Sequence[TranscribeDelta]) -> list[int]:
    """All tokens in order."""
    return [t.token_id for delta in deltas for s in delta.segments for t in s.tokens]


@dataclass
class FakeAsrEngine:
    """An engine client that returns `windows` for any sound; each is over at its second.

    `error` ends a job after `num_good` windows; jobs wait for `gate` before each. Remembers what
    became of every job.
    """

    windows: Sequence[tuple[float, tuple[TimedTokens, ...]]]
    language: str = "en"
    error: Exception | None = None
    num_good: int = 0
    gate: asyncio.Event | None = None
    journal: JobJournal = field(default_factory=JobJournal)
    submitted: dict[str, TranscribeRequest] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> AsyncGenerator[Output, None]:
        self.submitted[job_id] = request
        has_ended = False
        try:
            for n, (heard_s, segments) in enumerate(self.windows):
                if self.gate is not None:
                    await self.gate.wait()
                if self.error is not None and n >= self.num_good:
                    raise self.error
                has_ended = n == len(self.windows) - 1
                delta = TranscribeDelta(
                    segments=segments,
                    language=self.language,
                    heard_s=heard_s,
                    finish_reason="stop" if has_ended else None,
                )
                yield Output(job_id=job_id, payload=delta, is_final=has_ended)
        finally:
            (self.finished if has_ended else self.cancelled).append(job_id)

    def status(self) -> EngineStatus:
        return READY

    async def load(self, model: str) -> None: ...

    async def close(self) -> None: ...


def whisper_model(*, is_multilingual: bool = False) -> RecognizerText:
    """What the API process knows of the small model."""
    generation = MULTILINGUAL if is_multilingual else {}
    return RecognizerText(name="ears", traits=spec(**generation).traits, tokenizer=tokenizer())


def asr_service(engine: Any, *, is_multilingual: bool = False, **schedule: int) -> AsrService:
    """A service of the small model in front of `engine`."""
    model = whisper_model(is_multilingual=is_multilingual)
    admission = Admission(options=ScheduleOptions(**schedule))
    return AsrService(engine, [model], admission, ClipReader(None))


def asr_app(engine: Any, *, is_multilingual: bool = False, **server: Any) -> FastAPI:
    """The whole app in front of `engine`."""
    service = asr_service(engine, is_multilingual=is_multilingual)
    config = Config(server=ServerOptions(**server))
    return create_app(config, engine, [asr_router(service)])


def wav(pcm_S: Pcm) -> bytes:
    """A file of sound at 16 kHz."""
    return encode_clip("wav", SAMPLE_RATE, pcm_S)

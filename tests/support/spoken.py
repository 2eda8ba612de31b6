"""Speech requests through the real engine, and the sound that comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.one_engine import answers
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.ledger import Ledger
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
    SpeechOptions,
)
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.engine.loader import open_speech_loader
from triptych.modalities.tts.wire import SpeechDelta, SpeechRequest, SpeechSegment

GREEDY = SamplingParams(temperature=0.0)


def config_of(cache_dir: Path, **speech: Any) -> Config:
    return Config(
        models=ModelOptions(cache_dir=str(cache_dir), dtype="float32"),
        device=DeviceOptions(cpu_kernels="torch"),
        cache=CacheOptions(kv_cache_page_size=4),
        schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=16),
        speech=SpeechOptions(max_streams=4, **speech),
    )


def say(folder: Path, config: Config, *requests: SpeechRequest) -> list[list[SpeechDelta]]:
    """Speak all requests at once; the deltas of each."""
    resolved = ResolvedModel(name="m", reference=str(folder), folder=str(folder), digest="d")
    device, ledger = Device(torch.device("cpu")), Ledger(256 * 2**20)
    loader = open_speech_loader(resolved, config, device, ledger)
    return answers(loader, config, ledger, requests)


def sound(deltas: Sequence[SpeechDelta], segment: int = 0) -> np.ndarray:
    pcm = b"".join(delta.pcm for delta in deltas if delta.segment == segment)
    return np.frombuffer(pcm, dtype="<f4")


def request(*segments: tuple[int, ...], max_steps: int, **fields: Any) -> SpeechRequest:
    return SpeechRequest(
        segments=tuple(SpeechSegment(prompt_ids=ids, max_steps=max_steps) for ids in segments),
        sampling=GREEDY,
        **fields,
    )

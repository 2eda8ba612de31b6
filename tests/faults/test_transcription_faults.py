"""Hostile sound at the transcription route, decoded in a real child process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import numpy as np
import pytest

from support.asr import FakeAsrEngine, noise, timed_tokens, wav, whisper_model
from support.http import in_process
from triptych.core.http.app import create_app
from triptych.core.media.audio import decode
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.child import DecodePool
from triptych.core.options.config import Config, ScheduleOptions
from triptych.modalities.asr.api import service
from triptych.modalities.asr.api.routes import asr_router
from triptych.modalities.asr.api.service import AsrService
from triptych.modalities.asr.spec import SAMPLE_RATE
from triptych.schedulers.admission import Admission


@pytest.fixture
def engine() -> FakeAsrEngine:
    return FakeAsrEngine([(2.0, (timed_tokens(" Hello.", 0.0, 2.0),))])


@pytest.fixture
async def client(engine: FakeAsrEngine) -> AsyncIterator[httpx.AsyncClient]:
    pool = DecodePool([decode.__name__])
    models, admission = [whisper_model()], Admission(options=ScheduleOptions())
    asr = AsrService(engine, models, admission, decode.ClipReader(pool))
    app = create_app(Config(), engine, [asr_router(asr)])
    async with in_process(app) as client:
        yield client
    await pool.close()


async def send(client: httpx.AsyncClient, file: bytes) -> httpx.Response:
    return await client.post(
        "/v1/audio/transcriptions", data={"model": "ears"}, files={"file": ("a.wav", file)}
    )


async def test_hostile_files_cost_their_request_alone(
    client: httpx.AsyncClient, engine: FakeAsrEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(service.TRANSCRIPTION_LIMITS, max_seconds=30)
    monkeypatch.setattr(service, "TRANSCRIPTION_LIMITS", limits)
    bomb = encode_clip("flac", SAMPLE_RATE, np.zeros(120 * SAMPLE_RATE, np.float32))
    good = wav(noise(2.0))
    for file, status in (
        (bomb, 413),
        (b"", 400),
        (wav(noise(1 / SAMPLE_RATE)), 400),
        (wav(np.zeros(SAMPLE_RATE, np.float32)), 400),
        (good[: len(good) // 2] + bytes(100), 400),  # its header promises more
        (bomb[:200], 400),
        (b"ID3" + bytes(5000), 400),
        (b"<html>", 415),
    ):
        assert (await send(client, file)).status_code == status
    assert not engine.submitted
    assert (await send(client, good)).json()["text"] == "Hello."

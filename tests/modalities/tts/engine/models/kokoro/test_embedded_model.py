"""The released Kokoro, for real: text in, speech out, through engine and client."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import open_device
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel, resolve
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.text.guard import expected_duration
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.engine.models.kokoro.loader import KokoroLoader
from triptych.modalities.tts.sources.kokoro import KOKORO
from triptych.modalities.tts.wire import SpeechRequest
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

pytestmark = pytest.mark.embedded
TEXT = "Hello there, this is a short test. It costs $3."


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve(
        KOKORO.name,
        name=None,
        options=Config().models,
        progress=SilentProgress(),
        sources=[KOKORO],
    )


@asynccontextmanager
async def serving(model: ResolvedModel) -> AsyncIterator[LocalClient]:
    config = Config()
    device, ledger = open_device(config.device)
    loader = KokoroLoader(model, config, device, ledger)
    client = LocalClient(EngineCore([loader], config=config, ledger=ledger))
    try:
        yield client
    finally:
        await client.close()


async def test_it_speaks_as_long_as_such_a_text_takes_and_as_loud(model: ResolvedModel) -> None:
    front_end = open_front_end(model)
    voice = front_end.check_voice("marin")
    spoken = Normalizer()(TEXT)
    segments = [p.segment for p in front_end.plan(spoken, voice=voice, instructions="")]
    request = SpeechRequest(
        segments=tuple(segments), sampling=SamplingParams(seed=1), voice=voice, is_live=True
    )
    async with serving(model) as client:
        deltas = [o.payload async for o in client.submit(model.name, request, job_id="a")]
    assert [delta.segment for delta in deltas] == list(range(len(segments)))
    pcm_S = np.concatenate([np.frombuffer(delta.pcm, np.float32) for delta in deltas])
    expected = expected_duration(spoken.text)
    assert expected.least_s < len(pcm_S) / front_end.sample_rate < expected.most_s
    level_db = 20 * math.log10(float(np.sqrt(np.mean(pcm_S**2))))
    assert -35 < level_db < -10
    assert float(np.abs(pcm_S).max()) <= 1.0

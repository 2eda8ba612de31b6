"""Images through the whole engine, many requests at once, against transformers alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.vision_models import pixels, save_model
from support.vision_rig import Part, VisionRig, generate
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.ledger import Ledger
from triptych.core.options.config import CacheOptions, Config, ModelOptions, ScheduleOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.engine.loader import VisionLoader
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

NUM_TOKENS = 4
HELLO, THEN, WHAT = (1, 5, 9, 12), (13, 14), (20, 21, 22)
SUN, MOON, SMALL = pixels(40, 60, 1), pixels(40, 60, 2), pixels(20, 24, 3)
PROMPTS: tuple[tuple[Part, ...], ...] = (
    (HELLO, SUN, WHAT),
    (HELLO, MOON, WHAT),
    (HELLO, SUN, WHAT, THEN, SMALL, WHAT),
    (SMALL, THEN, SUN, THEN, MOON, WHAT),
    (HELLO, SUN, WHAT),
)
OWNERS = {"weights", "vision-weights", "activations", "vision-cache", "kv"}


@pytest.fixture(scope="module", params=["llava", "qwen3_vl", "gemma3", "paligemma"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(request.param, folder), folder


@pytest.fixture(params=[64, 0])
async def client(request: Any, loaded: tuple[Any, Path]) -> AsyncIterator[LocalClient]:
    config = Config(
        models=ModelOptions(model=("x",)),
        schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=16),
        cache=CacheOptions(kv_cache_page_size=4, max_vision_cache_entries=request.param),
    )
    ledger = Ledger(2**28)
    folder = str(loaded[1])
    resolved = ResolvedModel(name="tiny", reference="x", folder=folder, digest="00")
    loader = VisionLoader(resolved, config, Device.open("cpu"), ledger)
    client = LocalClient(EngineCore([loader], config=config, ledger=ledger))
    await client.load("tiny")
    assert set(ledger.by_owner()) == {f"tiny/{owner}" for owner in OWNERS}
    yield client
    await client.close()
    ledger.check()


@pytest.fixture(scope="module")
def rig(loaded: tuple[Any, Path]) -> VisionRig:
    return VisionRig(loaded[1])


async def ask(
    client: LocalClient, rig: VisionRig, job_id: str, parts: tuple[Part, ...]
) -> list[int]:
    prompt = rig.prompt(*parts)
    request = TokenRequest(
        prompt_ids=prompt.prompt_ids,
        contents=prompt.images,
        sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    )
    tokens: list[int] = []
    async for output in client.submit("tiny", request, job_id=job_id):
        assert output.error is None
        if isinstance(output.payload, TokenDelta):
            tokens += output.payload.token_ids
    return tokens


async def test_answers_are_transformers_own(
    client: LocalClient, rig: VisionRig, loaded: tuple[Any, Path]
) -> None:
    answers = await asyncio.gather(
        *(ask(client, rig, str(index), parts) for index, parts in enumerate(PROMPTS))
    )
    again = await ask(client, rig, "again", PROMPTS[2])
    expected = [generate(*loaded, rig, parts, NUM_TOKENS)[0] for parts in PROMPTS]
    assert [*answers, again] == [*expected, expected[2]]

"""Ranks of an image model in processes of their own: they generate as one, and die together."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from support.child_processes import ranks_of
from triptych.compose import build_engine
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import EngineDown
from triptych.core.options.config import Config, DeviceOptions, ModelOptions, ServerOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.source import FOLDER, NAME
from triptych.modalities.diffusion.wire import ImageRequest
from triptych.schedulers.local import LocalClient

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")


def open_client(cfg_parallel_size: int) -> LocalClient:
    config = Config(
        models=ModelOptions(model=(NAME,), dtype="float32"),
        device=DeviceOptions(device="cpu", cfg_parallel_size=cfg_parallel_size, threads=1),
        server=ServerOptions(stream_timeout_s=math.inf),
    )
    model = ResolvedModel(name=NAME, reference=NAME, folder=str(FOLDER), digest="00")
    return LocalClient(build_engine(config, [model]))


def request(**fields: object) -> ImageRequest:
    size = {"width": 128, "height": 128, "guidance_scale": 3.0, "seed": 3}
    return ImageRequest(prompt="a red apple on a blue background", **size | fields)  # type: ignore[arg-type]


async def generate(client: LocalClient) -> Pixels:
    await client.load(NAME)
    outputs = [each async for each in client.submit(NAME, request(num_steps=4), job_id="a")]
    assert all(each.error is None for each in outputs)
    (pixels,) = [each.payload.pixels for each in outputs if each.payload and each.payload.pixels]
    return pixels


async def kill_while_generating(client: LocalClient) -> float:
    """Kill the rank in the midst of a long generation; how long it took until that ended."""
    outputs = client.submit(NAME, request(num_steps=1000, has_progress=True), job_id="b")
    async for each in outputs:
        if each.payload and each.payload.step > 1:
            break
    ranks_of()[0].kill()
    killed_s = time.monotonic()
    with pytest.raises(EngineDown):
        async for _ in outputs:
            pass
    return time.monotonic() - killed_s


def test_two_ranks_generate_as_one_until_one_dies() -> None:
    async def of_one() -> Pixels:
        client = open_client(1)
        try:
            return await generate(client)
        finally:
            await client.close()

    async def of_two() -> tuple[Pixels, float]:
        client = open_client(2)
        pixels = await generate(client)
        assert len(ranks_of()) == 1
        took_s = await kill_while_generating(client)
        await client.close()
        return pixels, took_s

    expected = asyncio.run(of_one())
    pixels, took_s = asyncio.run(of_two())
    assert pixels == expected
    assert took_s < 10  # by the cut connection, and no timeout of the group's
    assert not ranks_of()

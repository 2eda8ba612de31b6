"""Chat while images are generated on the same device: the gaps between its tokens.

Decode steps go before those of images: on a GPU their stream has the higher priority, and captured
steps keep it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import numpy as np
from image_figures import GUIDANCE, PROMPT, size_and_steps, write_flux
from place import Place, Record, record
from text_figures import Row, generate, prepare, serving

from triptych.modalities.diffusion.wire import ImageRequest, StepCache
from triptych.schedulers.local import LocalClient

NUM_ROWS = 8
FLUX = "flux"


def run(place: Place) -> Iterator[Record]:
    """Gaps of chat alone, and with one image after another; the time of these images."""
    yield from asyncio.run(_measure(place))


async def _measure(place: Place) -> list[Record]:
    prepare(place, is_float8=False)
    write_flux(place.scratch / FLUX, place.is_tiny)
    length, num_tokens = (32, 16) if place.is_tiny else (512, 400)
    async with serving(place, f"{FLUX}={place.scratch / FLUX}") as client:
        await _image(client, place)  # compiles and captures
        alone_s = await _timed(_image(client, place))
        chat = await _rows(client, length, num_tokens)
        found = [record("chat alone", **gaps(chat)), record("image alone", seconds=alone_s)]
        rows = asyncio.create_task(_rows(client, length, num_tokens))
        seconds = []
        while not rows.done():
            seconds.append(await _timed(_image(client, place)))
        shared = gaps(await rows)
        return [*found, record("chat with images", **shared, image_s=float(np.median(seconds)))]


async def _rows(client: LocalClient, length: int, num_tokens: int) -> list[Row]:
    """Rows that decode together."""
    asked = (generate(client, length, num_tokens, index) for index in range(NUM_ROWS))
    return list(await asyncio.gather(*asked))


async def _image(client: LocalClient, place: Place) -> None:
    side, num_steps = size_and_steps(place)
    request = ImageRequest(
        prompt=PROMPT,
        width=side,
        height=side,
        seed=1,
        num_steps=num_steps,
        guidance_scale=GUIDANCE,
        cache=StepCache(name="off"),
    )
    async for _ in client.submit(FLUX, request, job_id=f"image-{time.monotonic_ns()}"):
        pass


async def _timed(work: Coroutine[Any, Any, None]) -> float:
    """Seconds of some work."""
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


def gaps(rows: list[Row]) -> dict[str, float]:
    """Milliseconds between the tokens of a row."""
    found_ms = 1e3 * np.concatenate([np.diff(row.times_s) for row in rows])
    return {f"gap_p{share}_ms": float(np.percentile(found_ms, share)) for share in (50, 90, 99)}

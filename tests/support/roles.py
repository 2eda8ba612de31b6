"""Engines of each role in this process, on weights of a folder, joined by a real socket."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.decoder_families import FAMILIES, save_family
from support.recurrent_models import RECURRENT, recurrent_model
from support.text_models import write_text_folder
from triptych.compose import build_engine
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    PipelineOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.core.weights.resolve import ResolvedModel
from triptych.schedulers.local import LocalClient

SECRET = "a secret that nobody else knows"
WAIT_S = 60.0


def role_config(
    role: str, address: str, folder: Path, *, encoder: str = "", **cache: object
) -> Config:
    """An engine of a role on one thread of the CPU, with small pages and chunks.

    At `encoder` it meets one that encodes images, as one of that role does at its `address`.
    """
    key_file = folder / "pipeline.key"
    key_file.write_text(SECRET)
    encoder = address if role == "encode" else encoder
    has_pages = role in ("prefill", "decode")
    options = PipelineOptions(
        pipeline_role=role,
        prefill_address=(address,) if has_pages else (),
        encoder_address=(encoder,) if encoder else (),
        pipeline_key_file=str(key_file) if has_pages or encoder else "",
    )
    return Config(
        models=ModelOptions(model=("tiny",)),
        device=DeviceOptions(device="cpu", threads=1),
        cache=CacheOptions(kv_cache_page_size=4, **cache),  # type: ignore[arg-type]
        schedule=ScheduleOptions(max_batch_size=4, max_batch_input_tokens=16),
        server=ServerOptions(stream_timeout_s=math.inf),
        pipeline=options,
    )


def save_text_family(folder: Path, name: str) -> None:
    """A tiny model of a family, with a tokenizer."""
    if name in RECURRENT:
        recurrent_model(name).save_pretrained(folder)
    else:
        family, extra = FAMILIES[name]
        save_family(folder, family, **extra)
    write_text_folder(folder, **json.loads((folder / "config.json").read_text()))


@asynccontextmanager
async def engine(
    config: Config, folder: Path, model: ResolvedModel | None = None
) -> AsyncIterator[LocalClient]:
    """An engine that is ready, of a chat model in a folder unless another is named `tiny`."""
    chat = ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="00")
    client = LocalClient(build_engine(config, [model or chat]))
    try:
        await asyncio.wait_for(client.load("tiny"), WAIT_S)
        yield client
    finally:
        await asyncio.wait_for(client.close(), WAIT_S)


async def series(client: LocalClient, name: str, least: float = 0.0) -> float:
    """A figure of the engine's, once it is at least so much."""
    async with asyncio.timeout(WAIT_S):
        while True:
            beat = client.status().last_beat
            if beat is not None:
                found = {**beat.gauges, **beat.counters}.get(f'triptych_{name}{{model="tiny"}}', 0)
                if found >= least:
                    return found
            await asyncio.sleep(0.02)


async def answer(client: LocalClient, request: TokenRequest, job_id: str) -> tuple[int, ...]:
    """The ids of an answer."""
    stream = client.submit("tiny", request, job_id=job_id)
    ids: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for output in stream:
            ids += output.payload.token_ids
    return tuple(ids)

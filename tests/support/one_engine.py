"""All requests of a model at once, through the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.schedulers.base import ModelLoader
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient


def answers(
    loader: ModelLoader, config: Config, ledger: Ledger, requests: Sequence[Any]
) -> list[list[Any]]:
    """The payloads of each request; the ledger is checked afterwards."""

    async def run() -> list[list[Any]]:
        client = LocalClient(EngineCore([loader], config=config, ledger=ledger))
        try:
            streams = [
                client.submit("m", request, job_id=f"j{index}")
                for index, request in enumerate(requests)
            ]
            return list(await asyncio.gather(*map(collect, streams)))
        finally:
            await client.close()

    async def collect(stream: Any) -> list[Any]:
        return [output.payload async for output in stream]

    found = asyncio.run(run())
    ledger.check()
    return found

"""Batches through their routes: begun, awaited, and their results by custom id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx

from support.stored_app import PATH, jsonl

Batch = dict[str, Any]


async def upload(client: httpx.AsyncClient, lines: Iterable[Any], purpose: str = "batch") -> str:
    files = {"file": ("in.jsonl", jsonl(lines))}
    reply = await client.post("/v1/files", data={"purpose": purpose}, files=files)
    return str(reply.json()["id"])


async def begin(client: httpx.AsyncClient, lines: Iterable[Any], **fields: Any) -> Batch:
    body = {"input_file_id": await upload(client, lines), "endpoint": PATH} | fields
    reply = await client.post("/v1/batches", json={"completion_window": "24h", **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def ended(client: httpx.AsyncClient, batch: Batch) -> Batch:
    """The batch, once it is over."""
    async with asyncio.timeout(20):
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def results(client: httpx.AsyncClient, file_id: str | None) -> dict[str | None, Any]:
    """The records of a file of results, by custom id."""
    if file_id is None:
        return {}
    text = (await client.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({each["id"] for each in found}) == len(found), "a line is answered once"
    return {each["custom_id"]: each for each in found}


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.005)

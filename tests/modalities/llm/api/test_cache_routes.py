"""Cached prompts are kept and dropped by their own key, and all of them by an admin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http import READY, FakeEngine, in_process, make_app
from triptych.core.engine_api.reports import ModelStatus

KEYS = {"api_key": ("one", "two"), "admin_key": ("chief",)}
STATE = replace(READY, models=(ModelStatus(model="tiny", state="ready"),))


async def post(client: httpx.AsyncClient, path: str, key: str = "", **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = await client.post(path, json=body or None, headers=headers)
    return {"status": reply.status_code, **reply.json()}


@pytest.mark.parametrize("action", ["pin", "unpin", "drop"])
async def test_a_prompt_is_named_as_for_tokenize(action: str, tmp_path: Path) -> None:
    engine = FakeEngine(state=STATE)
    async with in_process(make_app(tmp_path, engine)) as client:
        for body in ({"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}):
            tokens = (await post(client, "/tokenize", **body))["tokens"]
            reply = await post(client, f"/v1/cache/{action}", **body)
            assert reply["status"] == 200
            assert (reply["model"], reply["prompt_tokens"]) == ("tiny", len(tokens))
            request = [*engine.submitted.values()][-1]
            assert (request.cache_action, list(request.prompt_ids)) == (action, tokens)


async def test_keys_reach_their_own_pages_and_admins_all(tmp_path: Path) -> None:
    engine = FakeEngine(state=STATE)
    async with in_process(make_app(tmp_path, engine, **KEYS)) as client:
        for key in ("one", "two", "one"):
            assert (await post(client, "/v1/cache/drop", key, prompt="hello"))["status"] == 200
        first, second, third = (each.tenant for each in engine.submitted.values())
        assert first == third != second
        for path in ("/reset_prefix_cache", "/flush_cache"):
            assert (await post(client, path, "one"))["status"] == 403
            reply = await post(client, path, "chief")
            assert reply == {"status": 200, "cached_tokens": {"tiny": 1}}
            assert [*engine.submitted.values()][-1].cache_action == "clear"

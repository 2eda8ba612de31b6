"""Hundreds of failures, whatever they say inside: no path, address or traceback gets out."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path

import pytest

from support.http import FakeEngine, chat, documents, in_process, make_app
from triptych.core.errors import DeviceError, MemoryBudgetExceeded, WeightsError

NUM_FAILURES = 400
LEAK = re.compile(
    r"0x[0-9a-f]{4,}|/(home|tmp|usr|root|etc|dev|work)\b|[A-Z]:\\|Traceback|\.py\b|line \d+"
    r"|site-packages|SECRET",
    re.IGNORECASE,
)
PIECES = (
    "<object at 0x7f3c2a1b9d00>",
    "/home/user/models/weights.safetensors",
    "/dev/shm/psm_abc123",
    "C:\\models\\secret.bin",
    'Traceback (most recent call last):\n  File "/usr/lib/python3/x.py", line 3',
    "SECRET",
)
KINDS = (
    *(RuntimeError, ValueError, KeyError, OSError, MemoryError, AssertionError, RecursionError),
    *(ZeroDivisionError, UnicodeError, TimeoutError, ConnectionResetError, NotImplementedError),
    *(WeightsError, DeviceError, MemoryBudgetExceeded, StopAsyncIteration, LookupError),
)


def failure(draw: random.Random) -> Exception:
    """An exception with something secret in its words."""
    return draw.choice(KINDS)(" ".join(draw.sample(PIECES, k=draw.randint(1, 3))))


async def test_no_failure_of_ours_leaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # hundreds of tracebacks take time
    draw = random.Random(0)
    engine = FakeEngine()
    async with in_process(make_app(tmp_path, engine)) as client:
        for _ in range(NUM_FAILURES):
            engine.error, engine.num_good = failure(draw), draw.randint(0, 2)
            stream = draw.random() < 0.5
            reply = await client.post("/v1/chat/completions", json=chat(stream=stream))
            last = documents(reply.text)[-1] if "data:" in reply.text else reply.json()
            assert last["error"]["code"] in ("internal_error", "unavailable"), engine.error
            assert last["error"]["request_id"]
            assert LEAK.search(reply.text) is None, reply.text


JUNK: tuple[object, ...] = (
    *(None, True, -1, 2**70, 1.5, "", "x" * 300, "\0", "{{7*7}}", "../../etc", [], [[]], {}),
    *([None], {"a": {"b": []}}, [{"role": "user"}], "<|im_end|>", "NaN", [2**31], ["a", 1]),
)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
)
async def test_no_mistake_of_a_caller_breaks_anything(tmp_path: Path, path: str) -> None:
    draw = random.Random(path)
    app = make_app(tmp_path, FakeEngine())
    schema = app.openapi()["components"]["schemas"]
    name = app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    names = [*schema[name["schema"]["$ref"].rsplit("/", 1)[1]]["properties"], "tools", "odd"]
    good = {**chat(), "prompt": "x", "tokens": [5]}
    async with in_process(app) as client:
        for _ in range(NUM_FAILURES // 4):
            body = {name: good[name] for name in names if name in good and draw.random() < 0.9}
            body |= {name: draw.choice(JUNK) for name in draw.sample(names, k=2)}
            reply = await client.post(path, content=json.dumps(body), headers=JSON)
            assert reply.status_code < 500, (body, reply.text)
            if reply.status_code >= 400:
                assert reply.json()["error"]["code"]
                assert "Traceback" not in reply.text
                assert "0x" not in reply.text


JSON = {"content-type": "application/json"}

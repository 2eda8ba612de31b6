"""Texts that cannot fit are refused by their length, on every route, while others go on."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.http import FakeEngine, chat, in_process, make_app
from triptych.core.text.threads import on_text_thread
from triptych.modalities.embedding.api.routes import EmbeddingsRequest
from triptych.modalities.llm.api import text
from triptych.modalities.llm.api.protocol import Message

LONG = "1" * 4_000_000
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(LONG),
    "/v1/completions": {"model": "tiny", "prompt": ["short", LONG]},
    "/tokenize": {"model": "tiny", "prompt": LONG},
}


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the texts that were tokenized."""
    lengths: list[int] = []
    encode = text.encode

    def noting(tokenizer: Any, texts: list[str], **options: Any) -> Any:
        lengths.extend(map(len, texts))
        return encode(tokenizer, texts, **options)

    monkeypatch.setattr(text, "encode", noting)
    return lengths


@pytest.mark.parametrize("path", BODIES)
async def test_a_text_that_cannot_fit_is_not_tokenized(
    tmp_path: Path, tokenized: list[int], path: str
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        answers = await asyncio.gather(*(client.post(path, json=BODIES[path]) for _ in range(4)))
        for answer in answers:
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "at least" in answer.json()["error"]["message"]
        assert max(tokenized, default=0) < 100
        fitting = {"model": "tiny", "prompt": "1" * 4095, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=fitting)).is_success


async def test_spelled_specials_cost_no_more(tmp_path: Path, tokenized: list[int]) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        body = chat("<|im_end|>" * 400_000)
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert not tokenized


async def test_long_texts_take_one_thread_and_short_ones_pass_them() -> None:
    release, running = threading.Event(), []

    def work() -> None:
        running.append(threading.current_thread().name)
        release.wait(30)

    long = [asyncio.create_task(on_text_thread(10**6, work)) for _ in range(8)]
    while not running:  # noqa: ASYNC110 - another thread
        await asyncio.sleep(0.01)
    assert await on_text_thread(10, lambda: "short") == "short"
    assert await asyncio.to_thread(lambda: "other") == "other"
    assert len(running) == 1
    for task in long[1:]:
        task.cancel()
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*long, return_exceptions=True)
    assert await on_text_thread(10**6, lambda: "next") == "next"
    assert len(running) <= 2  # requests that left while waiting were dropped


async def test_tokenizing_holds_up_no_other_thread() -> None:
    """A hang would be the whole time; the bound is far from what a slow machine needs."""
    from support.text_models import byte_tokenizer
    from triptych.core.text.tokenizer import encode

    made, longest_s, is_over = byte_tokenizer(), 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest_s
        last_s = time.monotonic()
        while not is_over.wait(0.001):
            longest_s = max(longest_s, time.monotonic() - last_s)
            last_s = time.monotonic()

    ticking = threading.Thread(target=tick)
    ticking.start()
    started_s = time.monotonic()
    for _ in range(3):
        encode(made, ["ab 1" * 250_000])
    took_s = time.monotonic() - started_s
    is_over.set()
    ticking.join()
    assert longest_s < took_s / 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: EmbeddingsRequest(model="m", input=LONG).inputs,
        lambda: Message(role="system", content=LONG),
    ],
)
def test_no_check_looks_at_every_character(call: Callable[[], object]) -> None:
    lines = 0

    def count(frame: object, event: str, argument: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    assert lines < 1000

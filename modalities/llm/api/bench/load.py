"""The load of a benchmark: prompts of a given length, in parallel or at random times.

Owns the text of prompts, the same for every server under test. Knows no tokenizer: prompt lengths
follow from a measured number of tokens per word.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from triptych.modalities.llm.api.bench.client import RequestRecord

WORDS: Sequence[str] = tuple((Path(__file__).parent / "words.txt").read_text("utf-8").split())
"""Common English words, most of them one token in any vocabulary."""
Item = TypeVar("Item")
Send = Callable[[Item], Coroutine[Any, Any, RequestRecord]]
"""Sends the request of one prompt, and measures it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in flight at once, or requests per second."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"rate {self.rate:g}/s" if self.rate else f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One repeat against one server."""

    samples: tuple[RequestRecord, ...]
    elapsed_s: float


async def closed_loop(send: Send[Item], prompts: Sequence[Item], *, concurrency: int) -> Run:
    """Keep `concurrency` requests in flight until every prompt is answered."""
    waiting = iter(prompts)
    samples: list[RequestRecord] = []

    async def work() -> None:
        samples.extend([await send(prompt) for prompt in waiting])

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(work())
    return Run(samples=tuple(samples), elapsed_s=time.perf_counter() - started_s)


async def open_loop(send: Send[Item], prompts: Sequence[Item], *, rate: float, seed: int) -> Run:
    """Send prompts as a Poisson process of `rate` per second, independent of the answers."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    started_s = time.perf_counter()
    tasks: list[asyncio.Task[RequestRecord]] = []
    due_s = 0.0
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            await asyncio.sleep(max(started_s + due_s - time.perf_counter(), 0))
            tasks.append(group.create_task(send(prompt)))
            due_s += source.expovariate(rate)
    samples = tuple(task.result() for task in tasks)
    return Run(samples=samples, elapsed_s=time.perf_counter() - started_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload, in tokens; all prompts of a repeat share `shared_prefix_tokens`."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    seed: int = 0

    def prompts(self, *, repeat: int, tokens_per_word: float) -> list[str]:
        """The prompts of one repeat. No repeat shares text with another, so caches start cold."""

        def text(name: str, num_tokens: int) -> str:
            source = random.Random(f"{self.seed}/{repeat}/{name}")  # noqa: S311 - not for secrets
            return " ".join(source.choices(WORDS, k=max(round(num_tokens / tokens_per_word), 1)))

        own = self.prompt_tokens - self.shared_prefix_tokens
        prefix = (
            text("prefix", self.shared_prefix_tokens) + " " if self.shared_prefix_tokens else ""
        )
        return [prefix + text(str(index), own) for index in range(self.num_requests)]

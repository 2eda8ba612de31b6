"""How requests arrive: a fixed number at once, or at random times at a given rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.modalities.llm.api.bench.client import RequestRecord

Send = Callable[[str], Coroutine[Any, Any, RequestRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One repeat against one server."""

    samples: tuple[RequestRecord, ...]
    elapsed_s: float


async def closed_loop(send: Send, prompts: Sequence[str], *, concurrency: int) -> Run:
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


async def open_loop(send: Send, prompts: Sequence[str], *, rate: float, seed: int) -> Run:
    """Send prompts as a Poisson process of `rate` per second, however slow the answers are."""
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

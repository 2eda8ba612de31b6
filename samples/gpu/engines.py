"""Requests of any kind, answered by the engine on a device.

Owns the start and the end of an engine in this process, and the checks that its captured steps were
used. Knows no modality.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from triptych.compose import build_engine
from triptych.core.bundle.resolve import resolve_all
from triptych.core.options.table import make_config
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.weights.progress import SilentProgress
from triptych.schedulers.local import LocalClient

Answer = list[Any]
"""All deltas of a request."""
Waves = Sequence[Sequence[Any]]
"""Requests: those of a wave are submitted together, once the wave before has been answered."""
Options = Mapping[str, Any]

NAME = "model"
NUM_THREADS = 2
MEMORY_SHARE = 0.2
"""Of the device's free memory, so that stages of small models can run at the same time."""


def answer(
    folder: Path,
    waves: Waves,
    device: torch.device,
    cache: Path,
    options: Options,
    on_wave: Callable[[int], object] = lambda number: None,
) -> list[Answer]:
    """Answer all requests by the model in `folder`; `options` are those of `triptych serve`.

    `on_wave` is called before each wave, while the engine rests. Raises the first error of a
    request.
    """
    config = make_config(
        {
            "model": (f"{NAME}={folder}",),
            "device": device.type,
            "cache_dir": str(cache),
            "bundle": "none",
            "threads": NUM_THREADS,
            "device_memory_utilization": MEMORY_SHARE,
            **options,
        }
    )
    models = resolve_all(config.models, SilentProgress())

    async def run() -> list[Answer]:
        client = LocalClient(build_engine(config, models))
        try:
            await client.load(NAME)
            found: list[Answer] = []
            for number, wave in enumerate(waves):
                on_wave(number)
                jobs = (
                    _deltas(client, request, f"{number}-{place}")
                    for place, request in enumerate(wave)
                )
                found += await asyncio.gather(*jobs)
            return found
        finally:
            await client.close()

    return asyncio.run(run())


async def _deltas(client: LocalClient, request: Any, job_id: str) -> Answer:
    stream = client.submit(NAME, request, job_id=job_id)
    return [output.payload async for output in stream if output.payload is not None]


@dataclass(slots=True)
class Replays:
    """Steps that were replayed and steps that were to be and ran eagerly, by the kind of key."""

    keys: set[str] = field(default_factory=set)
    num_replayed: int = 0
    num_eager: int = 0


@contextmanager
def counted_replays() -> Iterator[Replays]:
    """Count the replays of captured steps of all models inside."""
    replays, run = Replays(), CapturedSteps.run

    def counted(steps: CapturedSteps, key: Any, *inputs: Any, **named: Any) -> Any:
        outputs = run(steps, key, *inputs, **named)
        replays.num_replayed += outputs is not None
        replays.num_eager += outputs is None
        replays.keys.add(str(key))
        return outputs

    setattr(CapturedSteps, "run", counted)  # noqa: B010 - a method is replaced
    try:
        yield replays
    finally:
        setattr(CapturedSteps, "run", run)  # noqa: B010


class Warnings(logging.Handler):
    """What the product logs as a warning or worse while this is entered.

    `texts` count messages; `traces` are the ends of the exceptions among them.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: Counter[str] = Counter()
        self.traces: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record."""
        self.texts[record.getMessage()[:300]] += 1
        if record.exc_info:
            self.traces.append("".join(traceback.format_exception(*record.exc_info))[-1000:])

    def __enter__(self) -> Warnings:
        logging.getLogger("triptych").addHandler(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        logging.getLogger("triptych").removeHandler(self)
        if error is not None:
            for text in self.traces[-1:]:
                error.add_note(text)

"""`triptych serve` that records stalls of its API process's event loop.

    python samples/benchmarks/ticking_server.py STALLS.jsonl --port 8000 ...

Every option after the file is one of `triptych serve`. An extra coroutine on that loop wakes up
every millisecond, and writes a line for each delay. `vision_intake.py` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych import api_process
from triptych.core.options.table import add_options, resolve_with_sources
from triptych.serve import Programs, serve

API = "--api"
_TICK_S = 0.001
_NOTED_S = 0.005


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall of the loop: when it ended, its duration, and its thread's CPU time."""

    at_s: float
    wall_s: float
    cpu_s: float


async def tick(path: Path) -> None:
    """Write every stall to a file."""
    with path.open("a", encoding="utf-8") as file:
        while True:
            wall_s, cpu_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            stall = Stall(now_s, now_s - wall_s - _TICK_S, time.thread_time() - cpu_s)
            if stall.wall_s > _NOTED_S:
                file.write(json.dumps(asdict(stall)) + "\n")
                file.flush()


def run_api(path: Path) -> None:
    """The API process with the extra coroutine."""
    run = api_process._run

    async def run_and_tick(*args: Any) -> None:
        ticking = asyncio.create_task(tick(path))
        await run(*args)
        ticking.cancel()

    api_process._run = run_and_tick
    api_process.main()


def main() -> int:
    """Run as the supervisor, or as the API process that it starts."""
    if sys.argv[1] == API:
        run_api(Path(sys.argv[2]))
    parser = argparse.ArgumentParser()
    add_options(parser)
    api = (sys.executable, str(Path(__file__).resolve()), API, sys.argv[1])
    return serve(resolve_with_sources(parser.parse_args(sys.argv[2:])), Programs(api=api))


if __name__ == "__main__":
    sys.exit(main())

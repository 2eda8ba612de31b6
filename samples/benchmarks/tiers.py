"""A long prefix computed, and found on the device, in host memory and on disk.

    python samples/benchmarks/tiers.py --model qwen2.5-coder-0.5b --output docs/benchmarks/tiers.md

The cache on the device holds one prompt, so each prompt evicts the last one. Times are those to the
first token of a prompt of `--tokens` known tokens and `--further` new ones. For the disk the engine
is restarted, and the system's cache of the files is dropped. Exits with 1 if an answer differs from
that of the computed prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from pages import markdown_table, write_section

from triptych.compose import build_engine
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.options.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.core.options.table import add_options, resolve_with_sources
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.registry import resolve_models
from triptych.schedulers.local import LocalClient

_ANSWER_TOKENS = 8
_LOWEST, _HIGHEST = 1000, 30_000  # token ids of random prompts
_ids = count()
Answer = tuple[float, tuple[int, ...]]


def config_of(name: str, folder: Path, num_tokens: int) -> Config:
    """An engine with tiers whose device holds one prompt."""
    settings = {"disk_offload_dir": str(folder), "host_offload_max_gb": 1.0}
    return Config(
        models=ModelOptions(model=(name,), max_length=num_tokens),
        cache=CacheOptions(kv_connector="tiered", kv_connector_config=json.dumps(settings)),
        schedule=ScheduleOptions(max_batch_size=1),
        server=ServerOptions(stream_timeout_s=math.inf),
    )


@asynccontextmanager
async def engine(model: ResolvedModel, config: Config) -> AsyncIterator[LocalClient]:
    """An engine that has answered once."""
    client = LocalClient(build_engine(config, [model]))
    try:
        await client.load(model.name)
        await ask(client, model, tuple(range(_LOWEST, _LOWEST + 64)))
        yield client
    finally:
        await client.close()


async def ask(client: LocalClient, model: ResolvedModel, prompt: tuple[int, ...]) -> Answer:
    """The milliseconds to the first token, and the answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    request = TokenRequest(prompt_ids=prompt, sampling=sampling)
    ids: list[int] = []
    begin_s, first_s = time.perf_counter(), 0.0
    async for output in client.submit(model.name, request, job_id=str(next(_ids))):
        first_s = first_s or time.perf_counter() - begin_s
        ids += output.payload.token_ids
    return 1e3 * first_s, tuple(ids)


def settle(folder: Path) -> None:
    """Wait until nothing is written any more."""
    before = -1
    while (now := sum(1 for _ in folder.rglob("*"))) != before:
        before = now
        time.sleep(0.5)


def drop_cached_files(folder: Path) -> None:
    """Have the system read files from the disk again."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


async def measure(
    model: ResolvedModel, args: argparse.Namespace, folder: Path
) -> dict[str, list[Answer]]:
    """The answers of each place, one for each prompt."""
    draw = random.Random(0)
    prompts = [
        tuple(draw.randrange(_LOWEST, _HIGHEST) for _ in range(args.tokens + args.further))
        for _ in range(args.rounds)
    ]
    config = config_of(model.name, folder, args.tokens + args.further + 64)
    found: dict[str, list[Answer]] = {}
    async with engine(model, config) as client:
        found["computed"], found["device"] = [], []
        for prompt in prompts:
            found["computed"].append(await ask(client, model, prompt))
            found["device"].append(await ask(client, model, prompt))
        found["host memory"] = [await ask(client, model, prompt) for prompt in prompts]
        await asyncio.to_thread(settle, folder)
    drop_cached_files(folder)
    async with engine(model, config) as client:
        found["disk, after a restart"] = [await ask(client, model, prompt) for prompt in prompts]
    return found


def table(found: dict[str, list[Answer]]) -> str:
    """Median times, their spread, and how much sooner than computed."""
    computed_ms = statistics.median(ms for ms, _ in found["computed"])
    rows = []
    for place, answers in found.items():
        times = [ms for ms, _ in answers]
        median = statistics.median(times)
        spread = f"{min(times):.0f} to {max(times):.0f}"
        rows.append([place, f"{median:.0f}", spread, f"{computed_ms / median:.1f}"])
    return markdown_table(["prefix", "first token, ms", "spread", "times sooner"], rows)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, sections=("models",))
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--further", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    (model,) = resolve_models(resolve_with_sources(args), SilentProgress())
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=Path.cwd()) as folder:
        found = asyncio.run(measure(model, args, Path(folder)))
    shown = table(found)
    print(shown)
    if args.output is not None:
        heading = f"## {model.name}, {args.tokens} tokens and {args.further} new ones"
        write_section(args.output, model.name, f"{heading}\n\n{shown}")
    expected = [answer for _, answer in found["computed"]]
    return int(any([ids for _, ids in answers] != expected for answers in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Llama 3.1 8B's shape in this process: decode, prompts and mixed load, as shares of the limits.

Random weights are made on the device. Decode is compared with reading every weight, and the cached
keys and values, once; prompts with the rate of a large product.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import triptych  # noqa: F401  # sets how torch's threads wait, before torch is loaded

# isort: split

import limits
import numpy as np
import profiles
import torch
import transformers
from host_waits import Waits
from place import Place, Record, error_text, record
from random_weights import in_float8, random_values, shapes_of, write_folder

from triptych.compose import build_engine
from triptych.core.bundle.resolve import resolve_all
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.options.config import Config
from triptych.core.options.table import make_config
from triptych.core.weights.progress import SilentProgress
from triptych.schedulers.local import LocalClient

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
}
TINY_LLAMA = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
NAME = "llama"


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that decode together: their number, the length of their prompts, and their tokens.

    Early rows decode while the prompts of late ones run, so `num_tokens` is more than is measured.
    """

    num_rows: int
    length: int
    num_tokens: int
    num_turns: int = 1


LOADS = (Load(1, 512, 96, 2), Load(8, 512, 96), Load(64, 1024, 128), Load(256, 512, 128))
TINY_LOADS = (Load(1, 32, 8), Load(4, 32, 16))
PROFILED = {1: 24, 64: 16}
"""Rows whose decode steps are profiled, and the number of these steps."""


@dataclass(slots=True)
class Row:
    """The arrival times of a row's tokens."""

    times_s: list[float] = field(default_factory=list)
    _has_grown: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, num_tokens: int) -> None:
        """Note tokens that arrive now."""
        self.times_s += [time.perf_counter()] * num_tokens
        self._has_grown.set()

    async def until(self, num_tokens: int) -> None:
        """Wait until there are so many tokens."""
        while len(self.times_s) < num_tokens:
            self._has_grown.clear()
            await self._has_grown.wait()


@dataclass(frozen=True, slots=True)
class Bounds:
    """A model's work, and the device's limits."""

    weight_bytes: int
    flops_per_token: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int
    read_bytes_per_s: float
    flops_per_s: float

    def decode_s(self, load: Load) -> float:
        """Seconds to read all weights and the cached tokens of a step once."""
        num_cached = load.num_rows * (load.length + load.num_tokens / 2)
        num_bytes = self.weight_bytes + num_cached * self.kv_bytes_per_token
        return num_bytes / self.read_bytes_per_s

    def prompt_s(self, length: int) -> float:
        """Seconds of a prompt's products at the full rate."""
        flops = self.flops_per_token * length + self.attention_flops_per_pair * length**2 / 2
        return flops / self.flops_per_s


def run(place: Place) -> Iterator[Record]:
    """The figures with weights in bfloat16."""
    return figures(place, is_float8=False)


def figures(place: Place, *, is_float8: bool) -> Iterator[Record]:
    """All figures, yielded as they come from the loop that serves them."""
    loop = asyncio.new_event_loop()
    records = _measure(place, is_float8=is_float8)
    try:
        while True:
            yield loop.run_until_complete(anext(records))
    except StopAsyncIteration:
        return
    finally:
        loop.run_until_complete(records.aclose())
        loop.close()


async def _measure(place: Place, *, is_float8: bool) -> AsyncIterator[Record]:
    bounds = prepare(place, is_float8=is_float8)
    started_s = time.perf_counter()
    async with serving(place) as client:
        yield record("load", seconds=time.perf_counter() - started_s)
        for load in TINY_LOADS if place.is_tiny else LOADS:
            yield await _attempt(
                f"decode, {load.num_rows} rows of {load.length}",
                decode(place, client, load, bounds),
            )
        for length in (16, 64) if place.is_tiny else (512, 8192):
            yield await _attempt(f"prompt of {length}", prompt(client, length, bounds))
        yield await _attempt("mixed load", mixed(place, client))
        for num_rows, num_steps in {1: 4}.items() if place.is_tiny else PROFILED.items():
            async for result in profiled(place, client, num_rows, num_steps):
                yield result


async def _attempt(name: str, work: Any) -> Record:
    try:
        return record(name, **await work)
    except Exception as error:  # one figure that fails must not end the others
        return record(name, error_text(error))


# ---- the model -----------------------------------------------------------------------------------


def prepare(place: Place, *, is_float8: bool) -> Bounds:
    """Write the model's folder, and measure the limits."""
    shape = transformers.LlamaConfig(
        **(TINY_LLAMA if place.is_tiny else LLAMA_8B), dtype="bfloat16"
    )
    shape.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(shape)
    tensors, config = shapes_of(module), shape.to_dict()
    if is_float8:
        tensors = in_float8(tensors)
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
        }
    write_folder(place.scratch / NAME, "model", config, tensors)
    embedding = shape.vocab_size * shape.hidden_size
    in_layers = sum(each.numel() for each in module.parameters()) - 2 * embedding
    rates = limits.read_rates(place) | limits.matrix_rate(place)
    if is_float8:
        rates["flops_per_s"] = limits.float8_rate(place)["flops_per_s_tensor"]
    place.release()  # before the engine learns how much is free
    return Bounds(
        weight_bytes=in_layers * (1 if is_float8 else 2) + 2 * embedding,
        flops_per_token=2 * in_layers,
        kv_bytes_per_token=4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim,
        attention_flops_per_pair=4 * shape.num_hidden_layers * shape.hidden_size,
        read_bytes_per_s=rates["read_bytes_per_s"],
        flops_per_s=rates["flops_per_s"],
    )


def token_config(place: Place, others: Sequence[str]) -> Config:
    """A server's options, with room for the loads; few sizes of steps, so that it starts soon."""
    options: dict[str, Any] = {
        "model": (f"{NAME}={place.scratch / NAME}", *others),
        "device": "gpu" if place.is_gpu else "cpu",
        "enable_prefix_caching": False,
    }
    if not place.is_tiny:
        options |= {"max_batch_size": 256, "max_batch_input_tokens": 8192}
    if place.is_gpu:
        options["device_graph_rows"] = (1, 4) if place.is_tiny else (1, 8, 32, 64, 256)
    return make_config(options)


@asynccontextmanager
async def serving(place: Place, *others: str) -> AsyncIterator[LocalClient]:
    """An engine on a thread of this process: the model, and others by name and folder."""
    config = token_config(place, others)
    models = resolve_all(config.models, SilentProgress())
    client = LocalClient(build_engine(config, models))
    try:
        with random_values(place.device):
            for model in reversed(models):  # a cache takes what others leave
                await client.load(model.name)
        yield client
    finally:
        await client.close()


# ---- figures -------------------------------------------------------------------------------------


async def generate(
    client: LocalClient, length: int, num_tokens: int, index: int, row: Row | None = None
) -> Row:
    """One row of a random prompt; `row` shows its progress."""
    ids = np.random.default_rng(index).integers(3, 500, length)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    request = TokenRequest(prompt_ids=tuple(ids.tolist()), sampling=sampling)
    row = Row() if row is None else row
    async for output in client.submit(NAME, request, job_id=f"{index}-{time.monotonic_ns()}"):
        if isinstance(output.payload, TokenDelta):
            row.add(len(output.payload.token_ids))
    return row


async def decode(place: Place, client: LocalClient, load: Load, bounds: Bounds) -> dict[str, Any]:
    """The median step while all rows decode, and what makes the host wait meanwhile."""
    found, waits = [], Waits()
    for turn in range(load.num_turns + 1):
        is_last = turn == load.num_turns
        with waits.counted(place if is_last else None):
            rows = await asyncio.gather(
                *(
                    generate(client, load.length, load.num_tokens, 1000 * turn + index)
                    for index in range(load.num_rows)
                )
            )
        found.append(step_s(rows))
        if load.num_rows > 8 and not is_last and place.left_s < 30:
            break
    seconds = statistics.median(found[1:] or found)
    return {
        "step_ms": 1e3 * seconds,
        "share_of_reading": bounds.decode_s(load) / seconds,
        "tokens_per_s": load.num_rows / seconds,
        **waits.figures(),
    }


def step_s(rows: Sequence[Row]) -> float:
    """Seconds of a step while all rows decode."""
    begin = max(row.times_s[0] for row in rows)
    end = min(row.times_s[-1] for row in rows)
    found = [
        (within[-1] - within[0]) / (len(within) - 1)
        for row in rows
        if len(within := [at for at in row.times_s if begin <= at <= end]) > 1
    ]
    return statistics.median(found)


async def prompt(client: LocalClient, length: int, bounds: Bounds) -> dict[str, float]:
    """One prompt alone, until its first token."""
    turns = []
    for turn in range(4):
        started_s = time.perf_counter()
        row = await generate(client, length, 1, 77_000 + turn)
        turns.append(row.times_s[0] - started_s)
    seconds = statistics.median(turns[1:])
    return {
        "ms": 1e3 * seconds,
        "first_ms": 1e3 * turns[0],
        "share_of_products": bounds.prompt_s(length) / seconds,
    }


async def mixed(place: Place, client: LocalClient) -> dict[str, Any]:
    """Clients that send a prompt as soon as their last answer has ended."""
    num_clients, length, num_tokens, seconds = (
        (4, 32, 8, 1.0) if place.is_tiny else (64, 512, 96, 6.0)
    )
    begun_s = time.perf_counter()
    until_s = begun_s + seconds

    async def ask(index: int) -> list[Row]:
        rows = []
        while time.perf_counter() < until_s:
            rows.append(await generate(client, length, num_tokens, 100_000 * index + len(rows)))
        return rows

    waits = Waits()
    with waits.counted(place):
        asked = await asyncio.gather(*(ask(index) for index in range(num_clients)))
    rows = list(chain.from_iterable(asked))
    taken_s = max(row.times_s[-1] for row in rows) - begun_s
    gaps = [float(gap) for row in rows for gap in np.diff(row.times_s) if gap > 0]
    return {
        "tokens_per_s": sum(len(row.times_s) for row in rows) / taken_s,
        "prompt_tokens_per_s": length * len(rows) / taken_s,
        "gap_p50_ms": 1e3 * float(np.percentile(gaps, 50)),
        "gap_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
        **waits.figures(),
    }


async def profiled(
    place: Place, client: LocalClient, num_rows: int, num_steps: int
) -> AsyncIterator[Record]:
    """A profile of some decode steps of rows with 1,024 cached tokens."""
    length, num_tokens = (32, 24) if place.is_tiny else (1024, 128)
    name = f"profile of decode, {num_rows} rows of {length}"
    rows = [Row() for _ in range(num_rows)]
    tasks = [
        asyncio.create_task(generate(client, length, num_tokens, 500_000 + index, row))
        for index, row in enumerate(rows)
    ]
    try:
        await asyncio.gather(*(row.until(4) for row in rows))
        with profiles.profiler(place) as profiled:
            num_before = len(rows[-1].times_s)
            await rows[-1].until(num_before + num_steps)
            taken = len(rows[-1].times_s) - num_before
            place.wait()
        await asyncio.gather(*tasks)
    except Exception as error:  # a profile that fails must not end the others
        yield record(name, error_text(error))
        return
    if place.is_tiny and not taken:
        return  # a tiny model may end its answer while the profiler starts
    for result in profiles.shown(name, profiled, taken):
        yield result

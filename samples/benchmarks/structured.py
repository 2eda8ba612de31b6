"""What structured output costs: decoding and the first token, with and without a grammar.

    python samples/benchmarks/structured.py --output docs/benchmarks
    python samples/benchmarks/structured.py --schemas 1000

Three kinds of answers take turns in one process, on the same model, with the same prompts and
seeds: free ones; ones by a pattern that allows any text (all that a mask costs, and nothing
gained); and ones by a JSON schema of many long names (where forced tokens are computed together).
`--stall` measures how long the event loop and free answers stand still while hostile schemas are
checked. `--schemas` counts how many of so many random schemas end with an answer that validates,
at temperature 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from triptych import ChatPipeline
from triptych.core.errors import RequestError

NAMES = [f"the_{word}_of_the_thing" for word in ("name", "age", "kind", "size", "price", "colour")]
PERSON = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 24} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "free": {"ignore_eos": True},
    "any text": {"ignore_eos": True, "guided_regex": r"(.|\n)*"},
    "schema": {"guided_json": {"type": "array", "items": PERSON, "minItems": 20}},
}
HOSTILE: Sequence[Mapping[str, Any]] = (
    {"guided_json": {"enum": ["x" * 100 + str(n) for n in range(10_000)]}},
    {"guided_json": '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000},
    {"guided_regex": "(x{1000}){1000}"},
    {"guided_regex": "(.{1,500}){1,500}"},
    {"guided_grammar": "start: " + " ".join(['"a"?'] * 20_000)},
)


class Asker:
    """Asks one pipeline, on the loop of its service."""

    def __init__(self, chat: ChatPipeline) -> None:
        self._chat = chat

    async def answer(self, index: int, options: Mapping[str, Any]) -> tuple[list[float], int]:
        """The moments of an answer's tokens, the first being that of the question; how many."""
        moments, num_tokens = [time.perf_counter()], 0
        call, requests = await self._chat._ask([f"Tell me story number {index}."], options)
        async for delta in self._chat._service.generate(call, requests):
            if delta.token_ids:
                moments.append(time.perf_counter())
                num_tokens += len(delta.token_ids)
        return moments, num_tokens

    async def batch(
        self, size: int, num_tokens: int, options: Mapping[str, Any]
    ) -> tuple[float, float]:
        """Tokens per second after the first, and milliseconds until it, of so many at once."""
        given = {"temperature": 1.0, "max_tokens": num_tokens, **options}
        answers = await asyncio.gather(
            *(self.answer(index, {**given, "seed": index}) for index in range(size))
        )
        begun_s = min(moments[1] for moments, _ in answers)
        ended_s = max(moments[-1] for moments, _ in answers)
        first_s = statistics.median(moments[1] - moments[0] for moments, _ in answers)
        return sum(count - 1 for _, count in answers) / (ended_s - begun_s), first_s * 1e3


async def stall(asker: Asker) -> dict[str, float]:
    """The longest the event loop stood still, and the longest gap of a free answer, in ms."""
    gaps = [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps[0] = max(gaps[0], now - last - 0.001)
            last = now

    async def free() -> float:
        moments, _ = await asker.answer(0, {"ignore_eos": True, "max_tokens": 200})
        return max(after - before for before, after in pairwise(moments[1:]))

    alone_s = await free()
    ticking = asyncio.create_task(tick())
    beside = asyncio.create_task(free())
    while not beside.done():
        for options in HOSTILE:
            try:
                await asker.answer(1, {**options, "max_tokens": 8})
            except RequestError:
                await asyncio.sleep(0)
    ticking.cancel()
    return {
        "loop_ms": gaps[0] * 1e3,
        "gap_beside_ms": await beside * 1e3,
        "gap_alone_ms": alone_s * 1e3,
    }


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the keywords that people use."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format"]
    kind = rng.choice(kinds + ["object", "object", "array", "anyOf"] * (depth > 0))
    if kind == "object":
        names = [rng.choice("abcdefgh") * rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = [name for name in properties if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    low = rng.randint(-99, 99)
    plain: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 12},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 999)},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": low + 10},
        "enum": {"enum": rng.sample(["red", 1, None, True, "a b", {"x": [1]}], 3)},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-f]{2,6}$", "^(ab|c)+$"])},
        "format": {"type": "string", "format": rng.choice(["date", "uuid", "email", "ipv4"])},
    }
    return plain.get(kind, {"type": kind})


async def validate(asker: ChatPipeline, num_schemas: int) -> dict[str, int]:
    """What became of answers to random schemas."""
    import jsonschema

    counts = {"valid": 0, "invalid": 0, "cut off": 0, "refused": 0}

    async def one(seed: int) -> str:
        schema = random_schema(random.Random(seed))
        options = {"guided_json": schema, "temperature": 1.0, "seed": seed, "max_tokens": 160}
        try:
            (answer,) = await asker._replies(["Some JSON, please."], options)
        except RequestError:
            return "refused"
        if answer.finish_reason == "length":
            return "cut off"
        try:
            jsonschema.validate(json.loads(answer.text), schema)
        except (ValueError, jsonschema.ValidationError):
            return "invalid"
        return "valid"

    for first in range(0, num_schemas, 32):
        seeds = range(first, min(first + 32, num_schemas))
        for end in await asyncio.gather(*map(one, seeds)):
            counts[end] += 1
    return counts


def main() -> None:
    """Measure, print, and write `structured.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--schemas", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a folder for structured.json")
    args = parser.parse_args()
    found: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.processor(), "rows": {}}
    with ChatPipeline.from_pretrained(max_length=1024, max_batch_size=32) as chat:
        asker, run = Asker(chat), chat._loop.run
        for size in args.batches:
            rows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for repeat in range(args.repeats + 1):  # the first one compiles and fills caches
                for kind, options in KINDS.items():
                    row = run(asker.batch(size, args.tokens, options))
                    rows[kind] += [row] if repeat else []
            found["rows"][size] = {
                kind: {
                    "tokens_per_s": [round(rate, 1) for rate, _ in row],
                    "first_token_ms": [round(first, 1) for _, first in row],
                }
                for kind, row in rows.items()
            }
            for kind, row in rows.items():
                rate, first = (statistics.median(column) for column in zip(*row, strict=True))
                print(f"{size:3} rows, {kind:9} {rate:7.1f} tok/s, first token {first:7.1f} ms")
        if args.stall:
            found["stall"] = run(stall(asker))
            print(found["stall"])
        if args.schemas:
            found["schemas"] = run(validate(chat, args.schemas))
            print(found["schemas"])
    if args.output:
        text = json.dumps(found, indent=1) + "\n"
        (args.output / "structured.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Constrained answers under stress: hostile schemas during other answers, and random schemas.

    python samples/benchmarks/structured_schemas.py --stall
    python samples/benchmarks/structured_schemas.py --schemas 1000
    python samples/benchmarks/structured_schemas.py --suite suite/tests/draft2020-12

`--stall` measures how long the event loop and free answers stall while hostile schemas are
checked. `--schemas` counts how many random schemas end with an answer that validates,
at temperature 1; `--suite` does so with the schemas in a folder of the JSON Schema test suite
(https://github.com/json-schema-org/JSON-Schema-Test-Suite).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from structured import Asker

from triptych import ChatPipeline
from triptych.core.errors import RequestError, TriptychError

HOSTILE: Sequence[Mapping[str, Any]] = (
    {"guided_json": {"enum": ["x" * 100 + str(n) for n in range(10_000)]}},
    {"guided_json": '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000},
    {"guided_regex": "(x{1000}){1000}"},
    {"guided_regex": "(.{1,500}){1,500}"},
    {"guided_grammar": "start: " + " ".join(['"a"?'] * 20_000)},
)


async def stall(asker: Asker) -> dict[str, float]:
    """The longest stall of the event loop, and the longest gap of a free answer, in ms.

    On a busy machine other processes cause most of the former: `loop_work_ms` is the loop's own.
    """
    gaps, work = [0.0], [0.0]

    async def tick() -> None:
        last, spent = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now, spent_now = time.perf_counter(), time.thread_time()
            gaps[0] = max(gaps[0], now - last - 0.001)
            work[0] = max(work[0], spent_now - spent)
            last, spent = now, spent_now

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
        "loop_work_ms": work[0] * 1e3,
        "gap_beside_ms": await beside * 1e3,
        "gap_alone_ms": alone_s * 1e3,
    }


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of common keywords."""
    kind = rng.choice([*_PLAIN, "object", *_COMBINED] if depth else list(_PLAIN))
    return _PLAIN[kind](rng) if kind in _PLAIN else _COMBINED[kind](rng, depth - 1)


def _range(rng: random.Random, size: int) -> dict[str, int]:
    low = rng.randint(-99, 99)
    return {rng.choice(["minimum", "exclusiveMinimum"]): low - 1, "maximum": low + size}


def _object(rng: random.Random, depth: int, letters: str = "abcdefgh") -> dict[str, Any]:
    names = [rng.choice(letters) * rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required}


def _named(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.choice([{"enum": ["k", "kk"]}, {"pattern": "^k[0-9]$"}])
    rest = random_schema(rng, depth)
    return {"type": "object", "propertyNames": names, "additionalProperties": rest}


def _extended(rng: random.Random, depth: int) -> dict[str, Any]:
    """Properties, and further ones of which one group or the other is required."""
    others = [_object(rng, depth, letters) for letters in ("ef", "gh")]
    word = rng.choice(["anyOf", "allOf"])
    return {**_object(rng, depth, "abcd"), word: others}


def _tagged(rng: random.Random, depth: int) -> dict[str, Any]:
    branches = [_object(rng, depth) for _ in range(3)]
    for tag, branch in enumerate(branches):
        branch["properties"]["kind"] = {"const": tag}
        branch["required"].append("kind")
    return {"oneOf": branches}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [random_schema(rng, depth) for _ in range(2)]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": 1}


_FAR = {"minimum": (-(2**63), 2**53), "maximum": (2**63 - 1, 2**64)}
_PATTERNS = ("^[a-f]{2,6}$", "^(ab|c)+$", r"^[^[\]]{1,3}$", r"^\S.$", r"^\d{3}-\w+$")
_FORMATS = ("date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6")
_PLAIN: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "boolean": lambda rng: {"type": rng.choice(["boolean", "null"])},
    "string": lambda rng: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 12},
    "integer": lambda rng: {"type": "integer", **_range(rng, rng.randint(0, 999))},
    "number": lambda rng: {"type": "number", **_range(rng, rng.randint(1, 10))},
    "far": lambda rng: {"type": "integer", **{word: rng.choice(_FAR[word]) for word in _FAR}},
    "multiple": lambda rng: {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0},
    "enum": lambda rng: {"enum": rng.sample(["red", 1, None, True, "a b", {"x": [1]}], 3)},
    "const": lambda rng: {"const": rng.choice(["on", 7, None, [1, "a"], 2.5])},
    "pattern": lambda rng: {"type": "string", "pattern": rng.choice(_PATTERNS)},
    "format": lambda rng: {"type": "string", "format": rng.choice(_FORMATS)},
    "nullable": lambda rng: {"type": ["integer", "null"], **_range(rng, 9)},
}
_COMBINED: Mapping[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "array": lambda rng, depth: {
        "type": "array",
        "items": random_schema(rng, depth),
        "maxItems": 3,
    },
    "anyOf": lambda rng, depth: {"anyOf": [random_schema(rng, depth) for _ in range(2)]},
    "object": _object,
    "names": _named,
    "extended": _extended,
    "tagged": _tagged,
    "tuple": _tuple,
}


def suite_schemas(folder: Path) -> list[Any]:
    """The schemas of a folder of the JSON Schema test suite, each once."""
    groups = (json.loads(file.read_text("utf-8")) for file in sorted(folder.rglob("*.json")))
    found = {json.dumps(case["schema"]): case["schema"] for group in groups for case in group}
    return list(found.values())


async def validate(asker: ChatPipeline, schemas: Sequence[Any]) -> dict[str, Any]:
    """The outcomes of answers to these schemas, and the wrong ones."""
    import jsonschema
    from jsonschema import validators

    ends = ("valid", "invalid", "unchecked", "cut off", "refused", "failed")
    counts: dict[str, Any] = dict.fromkeys(ends, 0)
    wrong: list[Any] = []

    async def one(seed: int, schema: Any) -> str:
        options = {"temperature": 1.0, "seed": seed, "max_tokens": 160}
        try:
            options["guided_json"] = schema if isinstance(schema, dict) else json.dumps(schema)
            (answer,) = await asker._replies(["Some JSON, please."], options)
        except TriptychError as error:
            is_refusal = isinstance(error, RequestError)
            wrong.append([schema, f"{type(error).__name__}: {error.message}"])
            return "refused" if is_refusal else "failed"
        if answer.finish_reason == "length":
            return "cut off"
        try:
            value = json.loads(answer.text)
            checker = validators.validator_for(schema, validators.Draft202012Validator)
            checker(schema, format_checker=checker.FORMAT_CHECKER).validate(value)
        except Exception as error:
            wrong.append([schema, answer.text, f"{type(error).__name__}: {str(error)[:200]}"])
            is_wrong = isinstance(error, ValueError | jsonschema.ValidationError)
            return "invalid" if is_wrong else "unchecked"  # a pattern that Python cannot read
        return "valid"

    for first in range(0, len(schemas), 32):
        batch = enumerate(schemas[first : first + 32], first)
        for end in await asyncio.gather(*(one(seed, schema) for seed, schema in batch)):
            counts[end] += 1
        print(first, counts, flush=True)
    return {**counts, "wrong": wrong}


def main() -> None:
    """Measure, print, and write `structured_schemas.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--schemas", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schema")
    parser.add_argument("--suite", type=Path, help="a folder of the JSON Schema test suite")
    parser.add_argument("--threads", type=int, default=0, help="of the engine")
    parser.add_argument("--output", type=Path, help="a folder for structured_schemas.json")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    sizes = {"max_length": 1024, "max_batch_size": 32, "threads": args.threads}
    with ChatPipeline.from_pretrained(**sizes) as chat:
        run = chat._loop.run
        if args.stall:
            found["stall"] = run(stall(Asker(chat)))
            print(found["stall"])
        schemas = [random_schema(random.Random(args.first + n)) for n in range(args.schemas)]
        if args.suite:
            schemas += suite_schemas(args.suite)
        if schemas:
            found["schemas"] = run(validate(chat, schemas))
            for case in found["schemas"]["wrong"]:
                print(json.dumps(case))
    if args.output:
        text = json.dumps(found, indent=1) + "\n"
        (args.output / "structured_schemas.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

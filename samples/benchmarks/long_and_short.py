"""One long prompt and twenty short ones on one server.

    triptych serve --model qwen2.5-coder-0.5b
    python samples/benchmarks/long_and_short.py

Streams the short prompts one after the other, then a long prompt alone, then the long one while the
short ones arrive, one every `--every-s` seconds. Prints the seconds to their first
tokens, and the end of the long answer, to compare with the sum of both alone. Prompts are random
words, so that no run finds pages of an earlier one. Works with any server of OpenAI's API: name
its model with `--model`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

WORDS = ("alpha", "beta", "gamma", "delta")  # a token each, with the space before it
RANDOM = random.Random()


@dataclass(frozen=True)
class Heard:
    """One stream, as its client saw it."""

    first_s: float
    end_s: float
    num_prompt_tokens: int


@dataclass(frozen=True)
class Server:
    """A server and one of its models."""

    http: httpx.AsyncClient
    model: str

    async def stream(self, num_words: int, max_tokens: int) -> Heard:
        """Stream the answer to a prompt of so many random words."""
        text = " ".join(RANDOM.choices(WORDS, k=num_words))
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s, first_s, num_prompt_tokens = time.perf_counter(), 0.0, 0
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        sys.exit(f"the server ended a stream: {chunk['error']}")
                    if chunk.get("usage"):
                        num_prompt_tokens = chunk["usage"]["prompt_tokens"]
                    if not first_s and any(_text(choice) for choice in chunk["choices"]):
                        first_s = time.perf_counter() - started_s
        end_s = time.perf_counter() - started_s
        return Heard(first_s or end_s, end_s, num_prompt_tokens)


def _text(choice: dict[str, dict[str, str]]) -> str:
    return choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""


@asynccontextmanager
async def connected(url: str, model: str) -> AsyncIterator[Server]:
    """Connect, and run each kind of step once: the first one of a server takes longer."""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as http:
        server = Server(http, model)
        await server.stream(600, 8)
        await asyncio.gather(*(server.stream(100, 8) for _ in range(4)))
        yield server


async def short_ones(server: Server, args: argparse.Namespace) -> list[Heard]:
    """Stream the short prompts, one every few seconds."""

    async def later(delay_s: float) -> Heard:
        await asyncio.sleep(delay_s)
        return await server.stream(args.short, args.tokens)

    delays_s = [1.0 + args.every_s * index for index in range(args.requests)]
    return await asyncio.gather(*map(later, delays_s))


async def measure(server: Server, args: argparse.Namespace) -> None:
    """Measure one round, and print it as rows of a table."""
    alone = [await server.stream(args.short, args.tokens) for _ in range(args.requests)]
    long = await server.stream(args.long, args.tokens)
    both = asyncio.gather(server.stream(args.long, args.tokens), short_ones(server, args))
    shared, short = await both
    work_s = sum(heard.end_s for heard in alone)
    delay = shared.end_s / (long.end_s + work_s) - 1
    print(
        f"| {args.requests} short prompts one after the other | {_firsts(alone)} | {work_s:.1f} |"
    )
    print(f"| a prompt of {long.num_prompt_tokens:,} tokens alone | - | {long.end_s:.1f} |")
    print(f"| both | {_firsts(short)} | {shared.end_s:.1f} ({delay:+.0%} to the sum) |", flush=True)


def _firsts(heard: list[Heard]) -> str:
    firsts_s = [each.first_s for each in heard]
    return f"{statistics.median(firsts_s):.2f}, {max(firsts_s):.2f}"


async def run(args: argparse.Namespace) -> None:
    """Measure all rounds."""
    async with connected(args.url, args.model) as server:
        print("| | first tokens of short prompts, s: median, most | end, s |\n|---|---|---|")
        for _ in range(args.repeats):
            await measure(server, args)


def main() -> None:
    """Measure a server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--long", type=int, default=20_000, help="words of the long prompt")
    parser.add_argument("--short", type=int, default=16, help="words of each short prompt")
    parser.add_argument("--requests", type=int, default=20, help="short prompts")
    parser.add_argument("--every-s", type=float, default=1.5, help="between two short prompts")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--repeats", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

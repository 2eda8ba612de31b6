"""How a few prompts of four million characters affect other requests.

    python samples/benchmarks/long_prompts.py                    # starts its own server
    python samples/benchmarks/long_prompts.py --url http://127.0.0.1:8000 --pid 4711

While some chats stream and `/livez` is polled ten times a second, long prompts are sent
concurrently to one route after the other. Prints the longest gap of any stream, the slowest
`/livez`, the response to each long prompt, and the API process's memory before and a minute after.
`--pid` is that of the server's supervisor; without it, memory is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

MODEL = "smollm2-135m-instruct"
CHARS = 4_000_000
TEXTS = {"digits": "1", "letters": "a", "spaces": " ", "angles": "<", "words": "hello world "}
REST_S = 60.0


@dataclass
class Watch:
    """Latencies of the other requests."""

    gaps_s: list[float] = field(default_factory=list)
    livez_s: list[float] = field(default_factory=list)
    num_cut: int = 0

    def __str__(self) -> str:
        return (
            f"longest gap of a stream {max(self.gaps_s, default=0.0):.3f} s, slowest /livez"
            f" {max(self.livez_s, default=0.0):.3f} s, streams cut {self.num_cut}"
        )


def body(**more: Any) -> dict[str, Any]:
    """The body of a chat."""
    messages = [{"role": "user", "content": "Tell a long story."}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **more}


async def stream(client: httpx.AsyncClient, watch: Watch) -> None:
    """Chat in a loop, recording the gaps between pieces of an answer."""
    asked = body(stream=True, max_tokens=400, ignore_eos=True)
    while True:
        try:
            async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
                last_s = 0.0
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        now_s = time.monotonic()
                        watch.gaps_s += [now_s - last_s] if last_s else []
                        last_s = now_s
        except httpx.HTTPError:
            watch.num_cut += 1
            await asyncio.sleep(0.5)


async def probe(client: httpx.AsyncClient, watch: Watch) -> None:
    """Poll `/livez` in a loop."""
    while True:
        started_s = time.monotonic()
        await client.get("/livez")
        watch.livez_s.append(time.monotonic() - started_s)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def watched(url: str, num_streams: int) -> AsyncIterator[Watch]:
    """Run the other requests until the block ends."""
    watch = Watch()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        works = [stream(client, watch) for _ in range(num_streams)]
        tasks = [asyncio.create_task(work) for work in (*works, probe(client, watch))]
        await asyncio.sleep(3)
        watch.gaps_s.clear()
        watch.livez_s.clear()
        yield watch
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bodies(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Request bodies with the text, for every route that takes one."""
    yield "/v1/chat/completions", body(messages=[{"role": "user", "content": text}], max_tokens=1)
    yield "/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 1}
    yield "/tokenize", {"model": MODEL, "prompt": text}
    yield "/v1/embeddings", {"model": MODEL, "input": text}


async def ask(client: httpx.AsyncClient, path: str, content: bytes) -> tuple[int, float]:
    """The status of a response, and its time."""
    started_s = time.monotonic()
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=content, headers=headers)
    return response.status_code, time.monotonic() - started_s


async def measure(url: str, args: argparse.Namespace) -> None:
    """Send every kind of text to every route; print the latencies of other requests."""
    for name in args.texts:
        for path, sent in bodies((TEXTS[name] * CHARS)[:CHARS]):
            content = json.dumps(sent).encode()
            async with watched(url, args.streams) as watch:
                async with httpx.AsyncClient(base_url=url, timeout=600) as client:
                    asked = [ask(client, path, content) for _ in range(args.requests)]
                    answers = await asyncio.gather(*asked)
                await asyncio.sleep(1)
            statuses = sorted({status for status, _ in answers})
            slowest_s = max(seconds for _, seconds in answers)
            print(f"{name:8} {path:22} {statuses} within {slowest_s:.3f} s; {watch}", flush=True)


def api_bytes(pid: int) -> int:
    """Memory of a server's API process."""
    children = psutil.Process(pid).children()
    (api,) = (child for child in children if "triptych.api_process" in child.cmdline())
    return int(api.memory_info().rss)


def report(url: str, pid: int, args: argparse.Namespace) -> None:
    """Measure, with memory before and after."""
    for path, sent in bodies("Good morning."):  # warms up lazy imports
        httpx.post(url + path, json=sent, timeout=600)
    before = api_bytes(pid) if pid else 0
    asyncio.run(measure(url, args))
    if pid:
        at_once = api_bytes(pid)
        time.sleep(REST_S)
        after = api_bytes(pid)
        sizes = ", ".join(f"{num_bytes / 2**20:.0f}" for num_bytes in (before, at_once, after))
        change = 100 * (after / before - 1)
        print(
            f"API process, MiB before, right after, {REST_S:.0f} s later: {sizes} ({change:+.1f} %)"
        )


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Start a server; its URL and the supervisor's pid."""
    with socket.create_server(("127.0.0.1", 0)) as probe_socket:
        port = probe_socket.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "triptych", "serve", "--port", str(port), "--model", "embedded"]
    process = subprocess.Popen([*argv, "--log-level", "error"])
    try:
        while True:
            if process.poll() is not None:
                sys.exit("the server did not start")
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure a server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a running server; default: start one")
    parser.add_argument("--pid", type=int, default=0)
    parser.add_argument("--requests", type=int, default=8, help="concurrent long prompts")
    parser.add_argument("--streams", type=int, default=4, help="concurrent chats")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    args = parser.parse_args()
    if args.url:
        report(args.url, args.pid, args)
        return
    with served() as (url, pid):
        report(url, pid, args)


if __name__ == "__main__":
    main()

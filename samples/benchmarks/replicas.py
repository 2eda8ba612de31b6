"""Two replicas on Ray on this machine: cached prefixes, a killed replica, an upgrade.

    pip install '.[ray]'
    python samples/benchmarks/replicas.py --output docs/benchmarks/replicas.md

Each replica has one thread. `prefixes`: groups of three chats share a long beginning, six groups
at a time; with prediction and with round-robin. `kill`: SIGKILL of an engine under load. `upgrade`:
the same command again, with `--ray-address`, under load. `scale`: `--replicas 1..2`, with more work
than one replica can do, then with little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil
from pages import markdown_table, write_section

MODEL = "smollm2-135m-instruct"
OPTIONS = ("--model", MODEL, "--threads", "1", "--max-length", "2048", "--max-batch-size", "16")
CACHE_MB = 96  # about 4,000 tokens
NUM_GROUPS = 24
NUM_OF_GROUP = 3
NUM_AT_ONCE = 6
SHARED_WORDS = 500
START_S = 300.0
DOWNSCALE_DELAY_S = 20


@dataclass(kw_only=True)
class Server:
    """`triptych serve --replicas 2`, and requests to it."""

    port: int
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def num_ready(self) -> int:
        """The number of ready replicas; 0 while the server does not answer."""
        try:
            health = httpx.get(f"{self.url}/readyz", timeout=5).json()
        except (httpx.TransportError, json.JSONDecodeError):
            return 0
        return int(health.get("num_replicas", 0)) if health.get("is_ready") else 0

    def wait(self, num_replicas: int) -> float:
        """Wait until `num_replicas` are ready; returns the seconds."""
        begun_s = time.monotonic()
        while self.num_ready() < num_replicas:
            if self.process.poll() is not None or time.monotonic() - begun_s > START_S:
                raise RuntimeError("the server did not become ready")
            time.sleep(0.1)
        return time.monotonic() - begun_s

    def wait_below(self, num_replicas: int) -> None:
        """Wait until fewer are ready."""
        while self.num_ready() >= num_replicas:
            time.sleep(0.05)

    def engines(self) -> list[psutil.Process]:
        """The processes that run engines."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in tree if "ServeReplica:triptych:engine" in _name(each)]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def command(port: int, *more: str) -> list[str]:
    """The command line of a server; the last value of an option applies."""
    serve = [sys.executable, "-m", "triptych", "serve", "--port", str(port), "--replicas", "2"]
    return [*serve, *OPTIONS, *more]


@contextmanager
def serving(folder: str, *more: str, num_ready: int = 2) -> Iterator[Server]:
    """A server, until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(command(port, *more), env=environment(folder))
    server = Server(port=port, process=process)
    try:
        server.wait(num_ready)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def environment(folder: str) -> dict[str, str]:
    """Ray's files are in a folder of this run."""
    return os.environ | {"RAY_TMPDIR": folder}


# -- prefixes ----------------------------------------------------------------------------------


def questions(seed: int) -> list[str]:
    """Every group's words and a question; some groups at a time, each of them in random order."""
    words = ["river", "stone", "cloud", "amber", "north", "seven", "paper", "light", "wheel"]
    order = random.Random(seed)
    asked = []
    for first in range(0, NUM_GROUPS, NUM_AT_ONCE):
        together = []
        for group in range(first, first + NUM_AT_ONCE):
            own = random.Random(group)
            shared = " ".join(own.choice(words) for _ in range(SHARED_WORDS))
            together += [f"{shared}. Question {n}: what now?" for n in range(NUM_OF_GROUP)]
        order.shuffle(together)
        asked += together
    return asked


async def cached_share(url: str, asked: Sequence[str]) -> tuple[float, float]:
    """Of all prompt tokens the share that was found cached, and the seconds of all requests."""
    gate, counts = asyncio.Semaphore(4), Counter[str]()
    begun_s = time.monotonic()

    async def ask(text: str) -> None:
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        async with gate:
            reply = await client.post("/v1/chat/completions", json=body)
        usage = reply.raise_for_status().json()["usage"]
        counts["prompt"] += usage["prompt_tokens"]
        counts["cached"] += usage["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*map(ask, asked))
    return counts["cached"] / counts["prompt"], time.monotonic() - begun_s


def prefixes(folder: str) -> list[list[str]]:
    """Rows of the table: a routing, its share of cached tokens, the seconds."""
    rows, shares = [], []
    for routing in ("round-robin", "predicted"):
        more = ("--replica-routing", routing, "--kv-cache-memory-mb", str(CACHE_MB))
        with serving(folder, *more) as server:
            warm = [f"Warm up number {number}. " * 20 for number in range(8)]
            asyncio.run(cached_share(server.url, warm))
            time.sleep(2)  # the next reports of the replicas
            share, seconds = asyncio.run(cached_share(server.url, questions(0)))
        shares.append(share)
        rows.append([routing, f"{share:.1%}", f"{share / shares[0]:.2f}", f"{seconds:.1f}"])
    return rows


# -- load --------------------------------------------------------------------------------------


class Load:
    """Concurrent streaming chats, and their outcomes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.outcomes: Counter[str] = Counter()
        self._is_over = False

    @asynccontextmanager
    async def running(self, num_clients: int) -> AsyncIterator[None]:
        """Clients send requests until the end of the block, and get their last answers."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            tasks = [asyncio.create_task(self._ask(client, n)) for n in range(num_clients)]
            try:
                yield
            finally:
                self._is_over = True
                await asyncio.gather(*tasks)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        count = 0
        while not self._is_over:
            count += 1
            text = f"Client {number}, request {count}: tell a story."
            self.outcomes[await self._outcome(client, text)] += 1

    async def _outcome(self, client: httpx.AsyncClient, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 48, "stream": True}
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = [line async for line in reply.aiter_lines() if line.startswith("data: ")]
        except httpx.TransportError as error:
            return f"cut off: {type(error).__name__}"
        if reply.status_code != 200:
            return f"status {reply.status_code}"
        errors = [json.loads(line[6:])["error"]["code"] for line in lines if '"error"' in line]
        if errors:
            return f"typed error: {errors[0]}"
        return "answered" if lines and lines[-1] == "data: [DONE]" else "cut off"


async def kill(server: Server) -> list[list[str]]:
    """SIGKILL one engine under load: outcomes of requests, and the time until it was back."""
    load = Load(server.url)
    async with load.running(8):
        await asyncio.sleep(8)
        server.engines()[0].kill()
        killed_s = time.monotonic()
        await asyncio.to_thread(server.wait_below, 2)
        noticed_s = time.monotonic() - killed_s
        await asyncio.to_thread(server.wait, 2)
        back_s = time.monotonic() - killed_s
        await asyncio.sleep(5)
    rows = [[what, str(count)] for what, count in sorted(load.outcomes.items())]
    rows.append(["seconds until the ingress says so", f"{noticed_s:.1f}"])
    rows.append(["seconds until two are ready again", f"{back_s:.1f}"])
    return rows


async def upgrade(server: Server, folder: str) -> list[list[str]]:
    """Deploy again with another option under load: outcomes of requests."""
    load = Load(server.url)
    async with load.running(4):
        await asyncio.sleep(3)
        begun_s = time.monotonic()
        argv = command(server.port, "--ray-address", "auto", "--max-batch-size", "12")
        deploying = await asyncio.create_subprocess_exec(*argv, env=environment(folder))
        code = await deploying.wait()
        took_s = time.monotonic() - begun_s
        await asyncio.sleep(3)
    rows = [[what, str(count)] for what, count in sorted(load.outcomes.items())]
    rows.append(["seconds of the upgrade", f"{took_s:.1f}"])
    rows.append(["its exit code", str(code)])
    return rows


async def scale(server: Server) -> list[list[str]]:
    """More work than one replica can do, then little: when the second starts, and when it ends."""
    much, little = Load(server.url), Load(server.url)
    async with little.running(1):
        begun_s = time.monotonic()
        async with much.running(16):
            await asyncio.to_thread(server.wait, 2)
            up_s = time.monotonic() - begun_s
            await asyncio.sleep(5)
        begun_s = time.monotonic()
        await asyncio.to_thread(server.wait_below, 2)
        down_s = time.monotonic() - begun_s
        await asyncio.sleep(5)
    rows = [[what, str(count)] for what, count in sorted((much.outcomes + little.outcomes).items())]
    rows.append(["seconds of much work until two are ready", f"{up_s:.1f}"])
    rows.append(
        [f"seconds of little until one is left ({DOWNSCALE_DELAY_S} asked)", f"{down_s:.1f}"]
    )
    return rows


# -- the report --------------------------------------------------------------------------------


def machine() -> str:
    """The processor and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")
    names = ("ray", "torch", "triptych")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{os.cpu_count()} cores of {model}; {versions}; {MODEL}."


def under_load(folder: str, parts: Sequence[str]) -> dict[str, str]:
    """Tables of `kill` and `upgrade`, of one server."""
    found: dict[str, str] = {}
    with serving(folder) as server:
        start_s = time.monotonic() - server.started_s
        if "kill" in parts:
            rows = asyncio.run(kill(server))
            rows.append(["seconds of the first start", f"{start_s:.1f}"])
            found["kill"] = markdown_table(["requests", "count"], rows)
        if "upgrade" in parts:
            rows = asyncio.run(upgrade(server, folder))
            found["upgrade"] = markdown_table(["requests", "count"], rows)
    return found


def scaled(folder: str) -> str:
    """The table of `scale`."""
    more = ("--replicas", "1..2", "--replica-downscale-delay-s", str(DOWNSCALE_DELAY_S))
    with serving(folder, *more, num_ready=1) as server:
        return markdown_table(["requests", "count"], asyncio.run(scale(server)))


def main() -> None:
    """Run the selected parts, print them, and write their sections."""
    parts = ("prefixes", "kill", "upgrade", "scale")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="ray_") as folder:
        if "prefixes" in args.parts:
            titles = ["routing", "prompt tokens found cached", "times in turn", "seconds"]
            found["prefixes"] = markdown_table(titles, prefixes(folder))
        if {"kill", "upgrade"} & set(args.parts):
            found |= under_load(folder, args.parts)
        if "scale" in args.parts:
            found["scale"] = scaled(folder)
    for name, table in found.items():
        content = f"{machine()}\n\n{table}"
        print(f"\n## {name}\n\n{content}", flush=True)
        if args.output:
            write_section(args.output, name, content)


if __name__ == "__main__":
    main()

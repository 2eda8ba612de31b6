"""Thirty-two large photographs at once: event-loop stalls of the API process, and memory.

    pip install -e '.[bench]'
    python samples/benchmarks/vision_intake.py --output docs/benchmarks

Starts the real server with a small vision model with random weights (the measured path is that of
an image to the engine), and a coroutine on the event loop of its API process that records stalls
(`ticking_server.py`). In each round every request has a different photograph of about 8 MB. Next to
the longest stall is the maximum CPU time of the loop's thread in a stall: the rest is time of other
processes on the same cores. Memory is that of the API process, and of all processes: before, at its
peak, and when all requests are answered. Image caches are part of it (`--options
'--prepared-images-mb 0'` disables them).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
import transformers
from chat_cpu import free_port, server, wait_until_ready
from rich.console import Console
from rich.table import Table
from ticking_server import API, Stall
from vision_turns import TINY, build_model, conversation, photograph

_SERVER = Path(__file__).resolve().with_name("ticking_server.py")
_SAMPLE_S = 0.05
_SETTLED_S = 5.0
_MIB = 2**20


@dataclass(slots=True)
class Memory:
    """Private memory of a process, in MiB."""

    api: float
    all: float


@dataclass(slots=True)
class Round:
    """The results of a round of requests."""

    seconds: float
    peak: Memory
    after: Memory
    stalls: list[Stall]


def memory_of(root: psutil.Process) -> Memory:
    """The server's memory now."""
    sizes = []
    for process in [root, *root.children(recursive=True)]:
        try:
            sizes.append((process.cmdline(), process.memory_info().rss / _MIB))
        except psutil.NoSuchProcess:  # a decoder that was replaced
            continue
    return Memory(
        api=sum(size for line, size in sizes if API in line),
        all=sum(size for _, size in sizes),
    )


@contextmanager
def watched(root: psutil.Process) -> Iterator[Memory]:
    """The maximum sizes until the block ends."""
    peak, is_over = memory_of(root), threading.Event()

    def watch() -> None:
        while not is_over.wait(_SAMPLE_S):
            now = memory_of(root)
            peak.api, peak.all = max(peak.api, now.api), max(peak.all, now.all)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def ask(url: str, body: bytes) -> None:
    """One request, in its own connection; SystemExit if it fails."""
    reply = httpx.post(
        f"{url}/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=600,
    )
    if reply.is_error:
        raise SystemExit(f"The server answered {reply.status_code}: {reply.text[:500]}")


def body_of(model: str, image: bytes) -> bytes:
    """A request body, made before the clock runs."""
    messages = conversation(image, 1)
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1}).encode()


def run_round(url: str, root: psutil.Process, log: Path, bodies: list[bytes]) -> Round:
    """All requests at once."""
    started_s = time.monotonic()
    with watched(root) as peak, ThreadPoolExecutor(len(bodies)) as threads:
        list(threads.map(lambda body: ask(url, body), bodies))
    ended_s = time.monotonic()
    time.sleep(_SETTLED_S)
    stalls = [Stall(**json.loads(line)) for line in log.read_text().splitlines()]
    mine = [stall for stall in stalls if started_s < stall.at_s < ended_s + _SETTLED_S]
    return Round(ended_s - started_s, peak, memory_of(root), mine)


def measure(args: argparse.Namespace, place: Path) -> tuple[Memory, list[Round]]:
    """Memory before, and every round."""
    folder, log, port = place / "model", place / "stalls.jsonl", free_port()
    build_model(folder, TINY)
    log.touch()
    url = f"http://127.0.0.1:{port}"
    command = (
        f"python {_SERVER} {log} --model {folder} --port {port}"
        f" --device cpu --kv-cache-memory-mb 512 --log-level warning {args.options}"
    )
    with server(command, place / "log"):
        wait_until_ready(f"{url}/readyz")
        me = psutil.Process(os.getpid())
        (root,) = (child for child in me.children() if str(_SERVER) in child.cmdline())
        for seed in range(args.warm_up):  # starts each decode child and loads each library
            ask(url, body_of(folder.name, photograph(10_000 + seed, 640, 480)))
        time.sleep(_SETTLED_S)
        before, rounds = memory_of(root), []
        for number in range(args.rounds):
            seeds = range(number * args.requests, (number + 1) * args.requests)
            bodies = [
                body_of(folder.name, photograph(seed, *args.size, args.quality)) for seed in seeds
            ]
            rounds.append(run_round(url, root, log, bodies))
        return before, rounds


def report(before: Memory, rounds: list[Round]) -> Table:
    """A row per round."""
    table = Table("", "seconds", "longest stall, ms", "most CPU time in one, ms", "over 50 ms")
    for name in ("API: MiB at its peak", "after", "all: MiB at its peak", "after"):
        table.add_column(name)
    table.add_row("before", "", "", "", "", "", f"{before.api:.0f}", "", f"{before.all:.0f}")
    for number, one in enumerate(rounds):
        table.add_row(
            f"round {number + 1}",
            f"{one.seconds:.1f}",
            f"{1000 * max((stall.wall_s for stall in one.stalls), default=0):.1f}",
            f"{1000 * max((stall.cpu_s for stall in one.stalls), default=0):.1f}",
            str(sum(stall.wall_s > 0.05 for stall in one.stalls)),
            f"{one.peak.api:.0f}",
            f"{one.after.api:.0f}",
            f"{one.peak.all:.0f}",
            f"{one.after.all:.0f}",
        )
    return table


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--size", type=int, nargs=2, default=(4000, 3000), metavar="PIXELS")
    parser.add_argument("--quality", type=int, default=96)
    parser.add_argument("--options", default="", help="more options of `triptych serve`")
    parser.add_argument("--output", type=Path, help="folder for vision_intake.json")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place:
        before, rounds = measure(args, Path(place))
    Console().print(report(before, rounds))
    if args.output:
        found = {"before": asdict(before), "rounds": [asdict(one) for one in rounds]}
        path = args.output / "vision_intake.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

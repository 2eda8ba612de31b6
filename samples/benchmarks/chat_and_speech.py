"""Chat and speech on one server: how each affects the other.

    python samples/benchmarks/chat_and_speech.py --output docs/benchmarks

Starts `triptych serve` with the embedded models and measures four phases:

- chats alone, each streaming answer after answer
- listeners alone, each requesting text after text and playing the audio as it arrives
- both at once
- both at once with a series of long prompts

Prints gaps between tokens, time to first audio, and underruns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import openai
from chat_cpu import free_port, server, wait_until_ready
from rich.console import Console
from rich.table import Table
from speech_streams import Heard

CHAT_MODEL = "smollm2-135m-instruct"
SAMPLE_RATE = 24_000
TEXT = (
    "The harbour was quiet that morning. A few boats had come in before the rain, and their crews"
    " stood under the long roof of the market, drinking coffee. Nobody spoke of the storm. When the"
    " bell rang at seven, the doors were opened, and the first buyers hurried in from the street."
)
QUESTION = "Tell me a long story about a lighthouse keeper."
LONG_PROMPT = "Count what follows. " + "One fish, two fish, a red fish and a blue fish. " * 100


@dataclass(slots=True)
class Findings:
    """The measurements of one phase, in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    first_sounds_s: list[float] = field(default_factory=list)
    underruns_s: list[float] = field(default_factory=list)
    sound_s: float = 0.0

    def add(self, heard: Heard) -> None:
        """Add one listener's record."""
        self.first_sounds_s.append(heard.first_s)
        self.underruns_s.append(heard.underrun_s)
        self.sound_s += sum(heard.sound_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The number of clients of each kind in a phase, and its duration."""

    num_chats: int
    num_listeners: int
    num_readers: int = 0
    seconds: float


class Users:
    """Clients of one server."""

    def __init__(self, port: int, speech_model: str) -> None:
        url = f"http://127.0.0.1:{port}/v1"
        self._openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=120)
        self._speech_model = speech_model

    async def close(self) -> None:
        """Close the connections."""
        await self._openai.close()
        await self._http.aclose()

    async def phase(self, load: Load) -> Findings:
        """Run `load`; requests in flight at the end are completed."""
        findings = Findings()
        ends_s = time.perf_counter() + load.seconds
        users = [self._chat(findings, ends_s) for _ in range(load.num_chats)]
        users += [self._listen(findings, ends_s) for _ in range(load.num_listeners)]
        users += [self._read(ends_s) for _ in range(load.num_readers)]
        await asyncio.gather(*users)
        return findings

    async def _chat(self, findings: Findings, ends_s: float) -> None:
        while time.perf_counter() < ends_s:
            stream = await self._openai.chat.completions.create(
                model=CHAT_MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=128,
                stream=True,
            )
            times = [time.perf_counter() async for chunk in stream if chunk.choices]
            findings.gaps_s += [later - earlier for earlier, later in pairwise(times)]

    async def _listen(self, findings: Findings, ends_s: float) -> None:
        while time.perf_counter() < ends_s:
            body = {"model": self._speech_model, "input": TEXT, "response_format": "pcm"}
            started_s = time.perf_counter()
            times: list[float] = []
            sound: list[float] = []
            async with self._http.stream("POST", "/audio/speech", json=body) as reply:
                reply.raise_for_status()
                async for data in reply.aiter_raw():
                    times.append(time.perf_counter() - started_s)
                    sound.append(len(data) / 2 / SAMPLE_RATE)
            findings.add(Heard(times_s=tuple(times), sound_s=tuple(sound)))

    async def _read(self, ends_s: float) -> None:
        number = 0
        while time.perf_counter() < ends_s:
            number += 1
            content = f"{number}. {LONG_PROMPT}"  # so that no two prompts share a prefix
            await self._openai.chat.completions.create(
                model=CHAT_MODEL, messages=[{"role": "user", "content": content}], max_tokens=1
            )


@asynccontextmanager
async def users(speech_model: str, log: Path) -> AsyncIterator[Users]:
    """Clients of a dedicated server."""
    port = free_port()
    with server(f"triptych serve --port {port} --log-level warning", log):
        wait_until_ready(f"http://127.0.0.1:{port}/readyz")
        model = speech_model or _speech_model(port)
        clients = Users(port, model)
        try:
            yield clients
        finally:
            await clients.close()


def _speech_model(port: int) -> str:
    cards = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
    return next(card["id"] for card in cards if card["task"] == "speech")


async def measure(args: argparse.Namespace, log: Path) -> dict[str, Findings]:
    """All phases in sequence, after a warm-up."""
    chats, listeners = args.chats, args.listeners
    loads = {
        "chat alone": Load(num_chats=chats, num_listeners=0, seconds=args.seconds),
        "speech alone": Load(num_chats=0, num_listeners=listeners, seconds=args.seconds),
        "both": Load(num_chats=chats, num_listeners=listeners, seconds=args.seconds),
        "both, and long prompts": Load(
            num_chats=chats, num_listeners=listeners, num_readers=1, seconds=args.seconds
        ),
    }
    async with users(args.speech_model, log) as clients:
        await clients.phase(Load(num_chats=1, num_listeners=1, seconds=1))
        return {name: await clients.phase(load) for name, load in loads.items()}


def report(phases: dict[str, Findings]) -> Table:
    """One line per phase."""
    table = Table(
        "",
        "gap between tokens, ms: median, p95, p99",
        "first audio, ms: median, maximum",
        "sound, s",
        "underruns, s",
    )
    for name, found in phases.items():
        table.add_row(
            name,
            milliseconds(found.gaps_s, 0.5, 0.95, 0.99),
            milliseconds(found.first_sounds_s, 0.5, 1.0),
            f"{found.sound_s:.0f}",
            f"{sum(found.underruns_s):.2f}",
        )
    return table


def milliseconds(values: Sequence[float], *shares: float) -> str:
    """Quantiles in milliseconds, for a table."""
    ordered = sorted(values)
    if not ordered:
        return ""
    return ", ".join(f"{1e3 * ordered[round(share * (len(ordered) - 1))]:.0f}" for share in shares)


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--listeners", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--speech-model", default="", help="default: the model served")
    parser.add_argument("--output", type=Path, help="folder for chat_and_speech.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        phases = asyncio.run(measure(args, Path(folder) / "server.log"))
    Console().print(report(phases))
    if args.output:
        document = {
            name: {
                "gap_ms": {
                    "median": 1e3 * statistics.median(found.gaps_s) if found.gaps_s else None,
                    "p95, p99": milliseconds(found.gaps_s, 0.95, 0.99),
                },
                "first_sounds_s": found.first_sounds_s,
                "underruns_s": found.underruns_s,
                "sound_s": found.sound_s,
            }
            for name, found in phases.items()
        }
        path = args.output / "chat_and_speech.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

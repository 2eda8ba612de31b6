"""Chat, speech and images on one server: how image generation affects latency of the others.

    python samples/benchmarks/all_together.py --output docs/benchmarks

Starts `triptych serve` with the embedded models and measures five phases:

- a chat alone, as the baseline
- the chat with eight concurrent image requests
- the chat and listeners, without image requests
- all three
- image requests alone

Prints gaps between the chat's tokens, time to first audio, underruns, and images per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import openai
from chat_and_speech import Findings, Load, Users, milliseconds
from chat_cpu import free_port, server, wait_until_ready
from rich.console import Console
from rich.table import Table

from triptych.modalities.diffusion.source import NAME as IMAGE_MODEL
from triptych.modalities.tts.modality import SPEECH


@dataclass(slots=True)
class Phase:
    """The measurements of one phase."""

    heard: Findings = field(default_factory=Findings)
    num_images: int = 0
    seconds: float = 0.0

    @property
    def images_per_s(self) -> float:
        """Throughput of images."""
        return self.num_images / self.seconds


class Painters:
    """Clients that keep requesting images."""

    def __init__(self, port: int) -> None:
        self._openai = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        )

    async def paint(self, phase: Phase, number: int, seconds: float) -> None:
        """Request one image after another; only those finished in time count."""
        ends_s = time.perf_counter() + seconds
        seed = 1000 * number
        while time.perf_counter() < ends_s:
            seed += 1
            await self._openai.images.generate(
                model=IMAGE_MODEL,
                prompt="a penguin next to a house",
                extra_body={"seed": seed, "steps": 50, "cache": "off"},
            )
            phase.num_images += time.perf_counter() < ends_s


async def run(users: Users, painters: Painters, load: Load, num_painters: int) -> Phase:
    """Run all clients for one phase."""
    phase = Phase(seconds=load.seconds)
    paint = [painters.paint(phase, number, load.seconds) for number in range(num_painters)]
    phase.heard, *_ = await asyncio.gather(users.phase(load), *paint)
    return phase


async def measure(port: int, args: argparse.Namespace) -> dict[str, Phase]:
    """All phases in sequence, after a warm-up."""
    users, painters = Users(port, SPEECH.default), Painters(port)
    seconds, listeners = args.seconds, args.listeners
    alone = Load(num_chats=1, num_listeners=0, seconds=seconds)
    no_users = Load(num_chats=0, num_listeners=0, seconds=seconds)
    everybody = Load(num_chats=1, num_listeners=listeners, seconds=seconds)
    warm_up = Load(num_chats=1, num_listeners=1, seconds=2)
    await run(users, painters, warm_up, args.painters)
    phases = {
        "chat alone": await run(users, painters, alone, 0),
        f"chat, {args.painters} images": await run(users, painters, alone, args.painters),
        "chat, speech": await run(users, painters, everybody, 0),
        "chat, speech, images": await run(users, painters, everybody, args.painters),
        "images alone": await run(users, painters, no_users, args.painters),
    }
    await users.close()
    return phases


def report(phases: dict[str, Phase]) -> Table:
    """One line per phase."""
    table = Table(
        "",
        "gap between tokens, ms: median, p95, p99",
        "first audio, ms: median, maximum",
        "underruns, s",
        "images per s",
    )
    for name, phase in phases.items():
        table.add_row(
            name,
            milliseconds(phase.heard.gaps_s, 0.5, 0.95, 0.99),
            milliseconds(phase.heard.first_sounds_s, 0.5, 1.0),
            f"{sum(phase.heard.underruns_s):.2f} of {phase.heard.sound_s:.0f}",
            f"{phase.images_per_s:.2f}",
        )
    return table


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--painters", type=int, default=8)
    parser.add_argument("--listeners", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--output", type=Path, help="folder for all_together.json")
    args = parser.parse_args()
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        server(f"triptych serve --port {port} --log-level warning", Path(folder) / "log"),
    ):
        wait_until_ready(f"http://127.0.0.1:{port}/readyz")
        phases = asyncio.run(measure(port, args))
    Console().print(report(phases))
    if args.output:
        document = {
            name: {
                "gap_ms": {
                    "median": 1e3 * statistics.median(phase.heard.gaps_s or [0.0]),
                    "median, p95, p99": milliseconds(phase.heard.gaps_s, 0.5, 0.95, 0.99),
                },
                "underruns_s": phase.heard.underruns_s,
                "sound_s": phase.heard.sound_s,
                "images_per_s": phase.images_per_s,
            }
            for name, phase in phases.items()
        }
        path = args.output / "all_together.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

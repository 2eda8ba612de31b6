"""Starts of a server: the first on an empty cache, later ones, and one from a moved bundle.

    python samples/benchmarks/warm_start.py --repeats 3 --output docs/benchmarks
    python samples/benchmarks/warm_start.py --model ./model.gguf

Each repeat begins with an empty cache folder, so the first start fetches, converts and compiles as
it does for a new user. The bundle is moved, and the start from it gets another empty folder.
Seconds are from the start of the command until `/readyz` would answer. CPU seconds are those of all
its processes, which other work on the machine lengthens less. Files stay in the system's page
cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pages import markdown_table, write_section
from processes import busy_s, watch_neighbours
from rich.console import Console
from rich.markdown import Markdown

from triptych.modalities.llm.api.bench.report import machine

TRIPTYCH = (sys.executable, "-m", "triptych")
FIRST, SECOND, WARM = "first start, empty cache", "later start", "from a moved bundle"
MAKE = "`triptych warm-cache` after a start"


@dataclass(frozen=True, slots=True)
class Start:
    """Duration, CPU seconds, and the use of the machine by other processes."""

    seconds: float
    busy_s: float
    num_other_cores: float
    phases: dict[str, float]


def start(*options: str) -> Start:
    """Start a server, wait until it is ready, and stop it."""
    argv = [*TRIPTYCH, "serve", "--port", "0", "--log-format", "json", *options]
    started_s, phases = time.perf_counter(), dict[str, float]()
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        with watch_neighbours(process.pid) as others:
            for line in process.stderr:
                record = json.loads(line) if line.startswith("{") else {}
                if phase := record.get("phase"):
                    phases[phase] = phases.get(phase, 0.0) + record["elapsed_s"]
                if "ready" in phases:
                    break
        seconds, total_s = time.perf_counter() - started_s, busy_s(process.pid)
        for _ in range(2):  # at once, but leaving nothing behind
            process.send_signal(signal.SIGINT)
    if "ready" not in phases:
        raise SystemExit("the server did not start; run `triptych serve` to see why")
    return Start(seconds, total_s, others.num_cores, phases)


def make(*options: str) -> Start:
    """Run `triptych warm-cache`."""
    started_s = time.perf_counter()
    subprocess.run([*TRIPTYCH, "warm-cache", *options], check=True, capture_output=True)
    return Start(time.perf_counter() - started_s, 0.0, 0.0, {})


def repeat(options: Sequence[str], folder: Path) -> dict[str, Start]:
    """Each kind of start once, in an empty folder."""
    cache, bundle = ("--cache-dir", str(folder / "cache")), folder / "bundle"
    results = {
        FIRST: start(*options, *cache, "--bundle", "none"),
        SECOND: start(*options, *cache, "--bundle", "none"),
        MAKE: make(*options, *cache, "--bundle", str(bundle)),
    }
    moved = shutil.move(bundle, folder / "moved")
    elsewhere = ("--cache-dir", str(folder / "elsewhere"), "--bundle", str(moved), "--offline")
    return results | {WARM: start(*options, *elsewhere)}


def rows(repeats: Sequence[dict[str, Start]]) -> list[list[str]]:
    """Medians and ranges of each kind of start."""
    first_s = statistics.median(each[FIRST].seconds for each in repeats)
    found = []
    for kind in repeats[0]:
        seconds = sorted(each[kind].seconds for each in repeats)
        median_s = statistics.median(seconds)
        busy = statistics.median(each[kind].busy_s for each in repeats)
        others = max(each[kind].num_other_cores for each in repeats)
        is_start = kind != MAKE
        found.append(
            [
                kind,
                f"{median_s:.1f} ({seconds[0]:.1f}-{seconds[-1]:.1f})",
                f"{first_s / median_s:.1f}" if is_start else "",
                f"{busy:.1f}" if is_start else "",
                f"{others:.1f}" if is_start else "",
            ]
        )
    return found


def main() -> None:
    """Measure, print, and write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder of warm_start.md")
    args, options = parser.parse_known_args()
    repeats = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            repeats.append(repeat(options, Path(folder)))
    titles = ["", "seconds", "times sooner", "CPU seconds", "other cores busy, at most"]
    here = machine()
    processor = f"{here['num_cores']} cores of {here['cpu']} ({', '.join(here['instructions'])})"
    table = f"{processor}; {args.repeats} repeats.\n\n{markdown_table(titles, rows(repeats))}"
    Console().print(Markdown(table))
    if args.output:
        write_section(args.output / "warm_start.md", "warm_start", table)
        figures = [
            {kind: {"seconds": each.seconds, **each.phases} for kind, each in one.items()}
            for one in repeats
        ]
        document = json.dumps({"machine": here, "repeats": figures}, indent=1, default=str)
        (args.output / "warm_start.json").write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

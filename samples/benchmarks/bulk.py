"""Bulk work in one process and over Ray Data: the same results, also after a killed run.

    pip install '.[ray]'
    python samples/benchmarks/bulk.py --output docs/bulk.md

Each command processes its rows in one process; then over two engines of a Ray cluster, where it
gets SIGKILL once some results are written and is run again. Results are compared byte for byte,
except the durations of images.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pages import markdown_table, write_section

from triptych.core.bulk.cluster import import_ray
from triptych.modalities.llm.api.bench.report import machine

TRIPTYCH = (sys.executable, "-m", "triptych")
NUM_ENGINES = 2
_COUNTS = re.compile(r"^Rows: (\d+), \w+: (\d+), there before: (\d+), failed: (\d+)", re.MULTILINE)
_TIMES = frozenset({"elapsed_s"})


@dataclass(frozen=True, kw_only=True)
class Task:
    """A command over the rows that `write` puts into a folder; `results` is its output."""

    write: Callable[[Path, int], Sequence[str]]
    results: str
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """The output of a run, and its seconds."""

    num_asked: int
    num_before: int
    num_failed: int
    seconds: float


def generate(folder: Path, num_rows: int) -> Sequence[str]:
    """Chats, greedy and sampled."""
    rows = [
        {
            "prompt": f"Tell a story of {n} animals.",
            "max_tokens": 40,
            "temperature": n % 2,
            "seed": n,
        }
        for n in range(num_rows)
    ]
    return ("generate", "-i", _jsonl(folder, rows), "--batch", "4", "--max-length", "512")


def embed(folder: Path, num_rows: int) -> Sequence[str]:
    """Texts of many lengths: three blocks."""
    rows = [{"text": f"Text {n} of things. " * (1 + n % 9)} for n in range(num_rows)]
    return ("embed", "-i", _jsonl(folder, rows))


def transcribe(folder: Path, num_rows: int) -> Sequence[str]:
    """Sentences that the embedded voice speaks."""
    sounds = folder / "sounds"
    sounds.mkdir()
    for n in range(num_rows):
        text = f"Train number {7 * n + 3} to the coast leaves in {n + 2} minutes."
        speak = (*TRIPTYCH, "speak", text, "--threads", "1", "-o", str(sounds / f"{n:02}.wav"))
        subprocess.run(speak, check=True, capture_output=True)
    return ("transcribe", str(sounds), "--format", "srt")


def imagine(folder: Path, num_rows: int) -> Sequence[str]:
    """Rows of small images."""
    things = ("a red apple", "a blue car", "a penguin", "a house")
    rows = [{"prompt": things[n % 4], "seed": n, "size": "64x64"} for n in range(num_rows)]
    return ("imagine", "--batch", _jsonl(folder, rows), "--steps", "4")


TASKS = {
    "generate": Task(write=generate, results="answers.jsonl", num_rows=24),
    "embed": Task(write=embed, results="vectors.jsonl", num_rows=3072),
    "transcribe": Task(write=transcribe, results="texts", num_rows=16),
    "imagine": Task(write=imagine, results="images", num_rows=32),
}


def _jsonl(folder: Path, rows: Sequence[dict[str, object]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def start(words: Sequence[str], output: Path, *more: str) -> subprocess.Popen[str]:
    """Start a command that writes to `output`."""
    argv = (*TRIPTYCH, *words, "-o", str(output), "--threads", "1", *more)
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def run(words: Sequence[str], output: Path, *more: str) -> Run:
    """Run a command to its end."""
    started_s = time.monotonic()
    with start(words, output, *more) as process:
        _, said = process.communicate()
    found = _COUNTS.search(said)
    if process.returncode or found is None:
        raise SystemExit(f"{words[0]} failed: {said[-2000:]}")
    _, asked, before, failed = map(int, found.groups())
    seconds = time.monotonic() - started_s
    return Run(num_asked=asked, num_before=before, num_failed=failed, seconds=seconds)


def kill_midway(words: Sequence[str], output: Path, *more: str) -> None:
    """Start a command, and kill it once some results are written."""
    records = output if output.suffix else output / "results.jsonl"
    with start(words, output, *more) as process:
        while not (records.exists() and records.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(
                    f"{words[0]} ended too soon: {process.stderr and process.stderr.read()}"
                )
            time.sleep(0.01)
        process.kill()


def results_of(output: Path) -> dict[str, object]:
    """Every record by its row, without times; every file by its digest."""
    records = output if output.suffix else output / "results.jsonl"
    found: dict[str, object] = {}
    for line in records.read_text().splitlines():
        record = json.loads(line)
        found[record["row"]] = {name: record[name] for name in record.keys() - _TIMES}
    if output.is_dir():
        files = (each for each in output.rglob("*") if each.is_file() and each != records)
        names = {str(each.relative_to(output)): each for each in files}
        found |= {name: sha256(each.read_bytes()).hexdigest() for name, each in names.items()}
    return found


def compare(name: str, address: str) -> list[str]:
    """A row of the table. Raises `SystemExit` if results differ."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = task.write(folder, task.num_rows)
        alone, spread = folder / f"alone-{task.results}", folder / f"spread-{task.results}"
        here = run(words, alone)
        more = ("--ray-address", address, "--replicas", str(NUM_ENGINES))
        kill_midway(words, spread, *more)
        again = run(words, spread, *more)
        expected, found = results_of(alone), results_of(spread)
        if not again.num_before or not again.num_asked:
            raise SystemExit(f"{name} was not killed midway: {again}")
        if found != expected or here.num_failed or again.num_failed:
            differ = [each for each in expected | found if expected.get(each) != found.get(each)]
            raise SystemExit(f"{name}: results differ: {differ}, {here}, {again}")
    counts = (task.num_rows, again.num_before, again.num_asked)
    return [name, *map(str, counts), f"{here.seconds:.0f}", f"{again.seconds:.0f}"]


def main() -> None:
    """Compare the selected commands, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    ray = import_ray()
    ray.init(num_cpus=NUM_ENGINES, include_dashboard=False, object_store_memory=256 * 2**20)
    address = ray.get_runtime_context().gcs_address
    rows = [compare(name, address) for name in args.parts]
    titles = ["command", "rows", "before the kill", "after it", "seconds, one process"]
    table = markdown_table([*titles, "seconds, second run on Ray"], rows)
    here = machine()
    content = f"{here['num_cores']} cores of {here['cpu']}; Ray {ray.__version__}.\n\n{table}"
    print(content)
    if args.output:
        write_section(args.output, "bulk", content)


if __name__ == "__main__":
    main()

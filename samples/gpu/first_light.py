"""Everything to learn from a GPU in nine minutes: what it can do, what is right, what is fast.

    python samples/gpu/first_light.py --out results                      # on a GPU
    python samples/gpu/first_light.py --out results --stages limits,kernel_times
    python samples/gpu/first_light.py --out results --device cpu --tiny  # a rehearsal: two minutes

Each stage is a module of this folder, and runs in a process of its own until its limit; one that
fails or is stopped does not end the others. Results are the lines of `first_light.jsonl`, written
as they come; what else the stages print is in `first_light.log`. A summary is printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

Line = dict[str, Any]

LIMITS_S = {
    "limits": 30,
    "modalities": 110,
    "replay": 50,
    "text_figures": 100,
    "image_figures": 90,
    "images": 60,
    "kernel_times": 100,
    "text_figures_fp8": 70,
    "codec_figures": 30,
    "chat_with_images": 50,
}
"""The stages by the names of their modules, in order, and the most seconds each may take."""
CHECKOUT = Path(__file__).parents[2]
BUDGET_S = 540.0
LEAST_S = 5.0
"""A stage with less time than this is not started."""
SUMMARY_CHARACTERS = 9_000
LINE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Results:
    """The files of results in `folder`."""

    folder: Path

    @property
    def lines(self) -> Path:
        """The results, one a line."""
        return self.folder / "first_light.jsonl"

    @property
    def log(self) -> Path:
        """Everything that stages print."""
        return self.folder / "first_light.log"

    def begin(self) -> None:
        """Make the folder, and remove what an earlier run left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in (self.lines, self.log):
            file.unlink(missing_ok=True)

    def add(self, stage: str, result: Line) -> None:
        """Append a line, which a stop of this process does not lose."""
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage} | result, default=str) + "\n")

    def read(self) -> list[Line]:
        """Read all lines."""
        return [json.loads(line) for line in self.lines.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Run the stages that the command line selects; the exit code is 1 if one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--stages", default=",".join(LIMITS_S), help="their names, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all stages")
    parser.add_argument("--in-process-until-s", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    results = Results(args.out)
    if args.in_process_until_s is not None:
        run_here(args, results)
        return
    names = args.stages.split(",")
    if unknown := set(names) - LIMITS_S.keys():
        parser.error(f"--stages: no stage {min(unknown)!r}; there are {', '.join(LIMITS_S)}")
    results.begin()
    signal.signal(signal.SIGTERM, _exit)
    set_environment()
    are_good = run_all(names, sys.argv[1:], args.budget_s, results)
    print(summary(results.read()), flush=True)
    sys.exit(0 if are_good else 1)


def set_environment() -> None:
    """Let stages import this checkout and its tests' helpers, and share the kernels they compile.

    `compile_ahead.py` can fill the folder of kernels beforehand.
    """
    kernels = Path(tempfile.gettempdir(), "first-light-triton")
    os.environ.setdefault("TRITON_CACHE_DIR", str(kernels))
    folders = [str(CHECKOUT / name) for name in ("src", "tests")]
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, others] if others else folders)


def run_here(args: argparse.Namespace, results: Results) -> None:
    """Run one stage in this process."""
    faulthandler.dump_traceback_later(max(args.in_process_until_s - time.monotonic() - 2, 1))
    import torch
    from place import Place

    with tempfile.TemporaryDirectory() as scratch:
        place = Place(torch.device(args.device), args.tiny, Path(scratch), args.in_process_until_s)
        for result in import_module(args.stages).run(place):
            results.add(args.stages, result)
    faulthandler.cancel_dump_traceback_later()


def run_all(
    names: Sequence[str], arguments: Sequence[str], budget_s: float, results: Results
) -> bool:
    """Run stages one after another; returns whether all ended well."""
    end_s = time.monotonic() + budget_s
    are_good = True
    for name in names:
        started_s = time.monotonic()
        limit_s = min(LIMITS_S[name], end_s - started_s)
        error: str | None = f"not started: {limit_s:.0f} s are left"
        if limit_s >= LEAST_S:
            print(f"{name}: at most {limit_s:.0f} s", flush=True)
            error = run_stage(name, arguments, limit_s, results)
        seconds = time.monotonic() - started_s
        print(f"{name}: {error or 'done'} after {seconds:.1f} s", flush=True)
        figures = {"seconds": seconds, "num_kernels": _num_kernels()}
        results.add(name, {"name": "all", "figures": figures, "error": error})
        are_good = are_good and error is None
    return are_good


def run_stage(name: str, arguments: Sequence[str], limit_s: float, results: Results) -> str | None:
    """Run a stage in a process group of its own until its limit; returns how it failed."""
    until_s = time.monotonic() + limit_s
    command = [sys.executable, __file__, *arguments, "--stages", name]
    command += ["--in-process-until-s", str(until_s)]
    with results.log.open("a", encoding="utf-8") as log:
        print(f"==== {name}", file=log, flush=True)
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped at its limit of {limit_s:.0f} s"
        finally:
            _kill_group(process)
    return f"ended with code {code}: {_last_line(results.log)}" if code else None


def _num_kernels() -> int:
    """Count the kernels compiled so far: a stage that adds some took longer for it."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Stop what is left of a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300]


def _exit(number: int, frame: FrameType | None) -> None:
    """End as `sys.exit` does, so that the running stage is stopped, too."""
    sys.exit(128 + number)


# ---- summary -------------------------------------------------------------------------------------


def summary(lines: Sequence[Line], num_characters: int = SUMMARY_CHARACTERS) -> str:
    """The results for a reader: first those with an error, then the figures, while there is room.

    Figures that there is no room for are counted for each stage.
    """
    failed = [line for line in lines if line["error"]]
    good = [line for line in lines if not line["error"]]
    texts = [f"{len(good)} results, {len(failed)} errors"]
    texts += [_shown(line) for line in failed[:20]]
    if len(failed) > 20:
        texts.append(f"and {len(failed) - 20} more errors")
    left = num_characters - sum(len(text) + 1 for text in texts)
    stages = dict.fromkeys(line["stage"] for line in good)
    for stage, share in zip(stages, range(len(stages), 0, -1), strict=True):
        kept, room = [], left // share
        shown = [_shown(line) for line in good if line["stage"] == stage]
        for text in shown:
            if len(text) + 1 <= room:
                kept.append(text)
                room -= len(text) + 1
        if len(kept) < len(shown):
            kept.append(f"{stage}: {len(shown) - len(kept)} more in the file")
        texts += kept
        left -= sum(len(text) + 1 for text in kept)
    return "\n".join(texts)


def _shown(line: Line) -> str:
    figures = ", ".join(f"{key} {_number(value)}" for key, value in line["figures"].items())
    error = (line["error"] or "").strip().splitlines()
    parts = [figures, error[-1][:240] if error else ""]
    text = f"{line['stage']} | {line['name']}: {'; '.join(part for part in parts if part)}"
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}..."


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    main()

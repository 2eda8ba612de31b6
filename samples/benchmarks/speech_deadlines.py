"""Speech scheduling by playback deadlines, against first-in-first-out and MAX's former policy.

    python samples/benchmarks/speech_deadlines.py --output docs/benchmarks

The real scheduler, timeline and engine run in virtual time (`speech_world.py`), with step times
from a linear cost model, the same for all (`--costs`). The baselines (`speech_baselines.py`) batch
all ready work; each is tried with several chunk sizes and options, and the best is shown.

Listeners play audio as it arrives. A number of them is *held* if no underrun is longer than 5 ms
and 95 % get their first audio within half a second, for every seed. Each listener sends the next
request after hearing its answer; the first ten seconds do not count. Then four fifths as many as
ours holds arrive by a Poisson process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from speech_baselines import FifoScheduler, MaxOptions, MaxScheduler
from speech_world import PRESETS, Costs, Heard, Load, Policy, World

from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions, SpeechOptions
from triptych.core.process.versions import versions
from triptych.modalities.llm.api.bench.report import machine, require_matplotlib
from triptych.modalities.tts.scheduling.scheduler import SpeechScheduler
from triptych.modalities.tts.scheduling.state import SpeechModel
from triptych.schedulers.base import Scheduler

GAP_S = 0.005
START_S = 0.5
MAX_ROWS = 256
MOST_LISTENERS = 64
OURS = "deadlines"
WORKLOADS = MappingProxyType(
    {
        "listeners alone": Load(),
        "with 16 files": Load(num_files=16),
    }
)


def deadlines(model: SpeechModel) -> Scheduler:
    """Ours, with its defaults except the number of rows."""
    return SpeechScheduler(
        model=model,
        pool=PagePool(num_pages=1 << 16, page_size=16),
        schedule=ScheduleOptions(max_batch_size=MAX_ROWS, max_batch_input_tokens=2048),
        speech=SpeechOptions(max_streams=MAX_ROWS),
        max_length=1 << 14,
        namespace=b"bench",
    )


def policies(costs: Costs) -> list[Policy]:
    """Ours, and the baselines with their tuning options."""
    second = round(1 / costs.frame_s)
    sizes = [(1,), (2,), (second // 3,), (second // 2,), (second,), (1, 2, 4, 8, second)]
    fifo = [
        Policy("fifo", f"chunks {size}", partial(FifoScheduler, chunks=size, max_rows=MAX_ROWS))
        for size in sizes
    ]
    variants = [MaxOptions(), MaxOptions(ce_delay_ms=20, enable_prioritize_first_decode=True)]
    older = [
        Policy(
            "max",
            f"chunks {size}, {_changed(options)}",
            partial(MaxScheduler, chunks=size, max_rows=MAX_ROWS, options=options),
        )
        for options in variants
        for size in sizes
    ]
    return [Policy(OURS, "defaults", deadlines), *fifo, *older]


def _changed(options: MaxOptions) -> str:
    plain = asdict(MaxOptions())
    changed = {name: value for name, value in asdict(options).items() if value != plain[name]}
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The results of one load."""

    num_answers: int
    broken_share: float
    first_p50_s: float
    first_p95_s: float
    audio_per_s: float
    files_per_s: float

    @property
    def is_held(self) -> bool:
        """Whether there was no underrun, and audio began soon."""
        return self.num_answers > 0 and not self.broken_share and self.first_p95_s <= START_S


def measure(policy: Policy, costs: Costs, load: Load) -> Figures:
    """Run a load to its end."""
    world = World(policy, costs, load)
    heard = world.run()
    firsts = [each.first_s for each in heard]
    return Figures(
        num_answers=len(heard),
        broken_share=sum(each.longest_gap_s > GAP_S for each in heard) / max(1, len(heard)),
        first_p50_s=_percentile(firsts, 50),
        first_p95_s=_percentile(firsts, 95),
        audio_per_s=_audio_s(heard) / load.duration_s,
        files_per_s=world.file_s / load.duration_s,
    )


def _audio_s(heard: Iterable[Heard]) -> float:
    return sum(each.playback.given_s for each in heard)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent, method="higher")) if values else 0.0


def num_held(policy: Policy, costs: Costs, load: Load, seeds: int, least: int = 0) -> int:
    """The most listeners that are held; `least` if one more than that is not."""

    def is_held(num_listeners: int) -> bool:
        loads = (replace(load, num_listeners=num_listeners, seed=seed) for seed in range(seeds))
        return all(measure(policy, costs, each).is_held for each in loads)

    if not is_held(least + 1):
        return least
    low, high = least + 1, MOST_LISTENERS
    while high - low > 1:
        middle = (low + high) // 2
        if is_held(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Result:
    """The best result of one policy for one workload, and its results at a given load."""

    name: str
    options: str
    num_held: int
    at_ours: Figures
    poisson: Figures


def compare(workload: Load, costs: Costs, seeds: int) -> list[Result]:
    """Ours and the best of each baseline."""
    best: dict[str, tuple[int, Policy]] = {}
    for policy in policies(costs):
        least = best[policy.name][0] if policy.name in best else 0
        found = num_held(policy, costs, workload, seeds, least)
        if policy.name not in best or found > least:
            best[policy.name] = (found, policy)
    most = best[OURS][0]
    at_ours = replace(workload, num_listeners=most)
    rate_per_s = 0.8 * most / workload.mean_speech_s
    poisson = replace(workload, rate_per_s=rate_per_s, duration_s=2 * workload.duration_s)
    return [
        Result(
            name,
            policy.options,
            found,
            measure(policy, costs, at_ours),
            measure(policy, costs, poisson),
        )
        for name, (found, policy) in best.items()
    ]


def table(name: str, results: Sequence[Result]) -> Table:
    """Rows of one workload."""
    ours = results[0]
    sheet = Table("policy", title=f"{name}: listeners held, and all policies at {ours.num_held}")
    for title in ("held", "ours / it", "underruns", "first p50", "first p95", "audio s/s"):
        sheet.add_column(title, justify="right")
    for title in ("files s/s", "Poisson: underruns", "first p95"):
        sheet.add_column(title, justify="right")
    sheet.add_column("its best options")
    for result in results:
        at, poisson = result.at_ours, result.poisson
        ratio = f"{ours.num_held / result.num_held:.2f}x" if result.num_held else "none held"
        sheet.add_row(
            *(result.name, str(result.num_held), "" if result is ours else ratio),
            *(f"{at.broken_share:.0%}", f"{1e3 * at.first_p50_s:.0f} ms"),
            *(f"{1e3 * at.first_p95_s:.0f} ms", f"{at.audio_per_s:.1f}"),
            f"{at.files_per_s:.1f}",
            *(f"{poisson.broken_share:.1%}", f"{1e3 * poisson.first_p95_s:.0f} ms"),
            result.options,
        )
    return sheet


def plot(results: dict[str, list[Result]], path: Path) -> None:
    """Listeners held, by workload and policy."""
    figure = require_matplotlib()(figsize=(9, 3.6), layout="constrained")
    held, first = figure.subplots(1, 2)
    held.set(title="listeners held without an underrun")
    first.set(title="first audio at ours' number, 95 % within", ylabel="ms", yscale="log")
    names = [result.name for result in next(iter(results.values()))]
    for index, name in enumerate(names):
        mine = [each for group in results.values() for each in group if each.name == name]
        at = [position + 0.25 * index for position in range(len(mine))]
        held.bar(at, [each.num_held for each in mine], 0.25, label=name)
        first.bar(at, [1e3 * each.at_ours.first_p95_s for each in mine], 0.25)
    for axes in (held, first):
        axes.set_xticks([0.25 + position for position in range(len(results))], list(results))
    held.legend()
    figure.savefig(path, dpi=150, format="png")


def document(results: dict[str, list[Result]], costs: Costs, seeds: int) -> dict[str, Any]:
    """All results as plain data."""
    return {
        "schema": 1,
        "versions": versions(),
        "machine": machine(),
        "costs": asdict(costs),
        "held": {"gap_s": GAP_S, "first_p95_s": START_S, "seeds": seeds},
        "workloads": {
            name: {"load": asdict(WORKLOADS[name]), "policies": [asdict(each) for each in group]}
            for name, group in results.items()
        },
    }


def main() -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"))
    parser.add_argument("--costs", choices=PRESETS, default="cpu")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=min(len(WORKLOADS), os.cpu_count() or 1))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    costs = PRESETS[args.costs]
    with ProcessPoolExecutor(args.processes) as pool:
        found = pool.map(partial(compare, costs=costs, seeds=args.seeds), WORKLOADS.values())
        results = dict(zip(WORKLOADS, found, strict=True))
    for name, group in results.items():
        Console(width=170).print(table(name, group))
    stem = args.output / "speech_deadlines"
    stem.with_suffix(".json").write_text(
        json.dumps(document(results, costs, args.seeds), indent=1) + "\n", encoding="utf-8"
    )
    plot(results, stem.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""From samples to figures, and the output of a benchmark: a table, JSON, an image.

Owns the definition of each metric (names end in their unit) and the form of each output. The
description of the machine names no host and no address.

    ttft      sent to first piece of text
    itl       between pieces of text, over all requests
    tpot      first piece to end, per further token, of each request
    e2e       sent to end
"""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from triptych.core.errors import ConfigError
from triptych.core.process.threads import num_usable_cores
from triptych.core.process.versions import versions
from triptych.modalities.llm.api.bench.client import BenchServer
from triptych.modalities.llm.api.bench.load import Run, Workload

PERCENTILES = (50, 90, 99)
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over repeats."""

    median: float
    low: float
    high: float


def summarize(run: Run) -> Metrics:
    """Figures of one repeat; latencies are absent where no request succeeded."""
    good = [sample for sample in run.samples if not sample.error]
    counts = {"output": [sample.num_output_tokens for sample in good]}
    if any(sample.num_prompt_tokens for sample in good):  # of servers that report them
        counts["prompt"] = [sample.num_prompt_tokens for sample in good]
        counts["cached"] = [sample.num_cached_tokens for sample in good]
    latencies = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "tpot": [
            (sample.ended_s - sample.arrivals_s[0]) / (sample.num_output_tokens - 1)
            for sample in good
            if sample.num_output_tokens > 1
        ],
        "e2e": [sample.e2e_s for sample in good],
    }
    return {
        "output_tokens_per_s": sum(counts["output"]) / run.elapsed_s,
        "requests_per_s": len(good) / run.elapsed_s,
        **{
            f"{name}_p{percent}_s": value
            for name, values in latencies.items()
            for percent, value in percentiles(values).items()
        },
        **{f"{name}_tokens_mean": statistics.fmean(each) for name, each in counts.items() if each},
        "elapsed_s": run.elapsed_s,
        "num_errors": len(run.samples) - len(good),
    }


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """The `PERCENTILES` of `values`, linearly interpolated; empty for none."""
    if not values:
        return {}
    found = np.percentile(np.asarray(values), PERCENTILES)
    return dict(zip(PERCENTILES, found.tolist(), strict=True))


def over_repeats(repeats: Sequence[Metrics]) -> dict[str, Spread]:
    """Median, least and greatest of each metric that every repeat has."""
    names = [name for name in repeats[0] if all(name in repeat for repeat in repeats)]
    return {name: spread([repeat[name] for repeat in repeats]) for name in names}


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of `values`."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[Metrics], theirs: Sequence[Metrics]) -> dict[str, Spread]:
    """`theirs / ours` of each metric, repeat by repeat, so that a drifting machine cancels out."""
    pairs = list(zip(ours, theirs, strict=True))
    names = [name for name in ours[0] if all(a.get(name) and b.get(name) for a, b in pairs)]
    return {name: spread([b[name] / a[name] for a, b in pairs]) for name in names}


def count_errors(runs: Sequence[Run]) -> Mapping[str, int]:
    """How often each kind of error happened."""
    return Counter(sample.error for run in runs for sample in run.samples if sample.error)


_SHOWN = (
    "output_tokens_per_s",
    "requests_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p99_s",
    "tpot_p50_s",
    "e2e_p50_s",
    "e2e_p99_s",
    "prompt_tokens_mean",
    "cached_tokens_mean",
    "output_tokens_mean",
    "num_errors",
)
_INSTRUCTIONS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""The CPU features that decide the speed of matrix multiplication, widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything measured on one target, one run per repeat."""

    target: BenchServer
    runs: tuple[Run, ...]

    @property
    def metrics(self) -> list[Metrics]:
        """Figures of each repeat."""
        return [summarize(run) for run in self.runs]


def table(results: Sequence[Result]) -> Table:
    """Medians with spread; with two targets or more, ratios to the first."""
    first, *others = results
    titles = [result.target.label for result in results]
    compared = [f"{result.target.label} / {first.target.label}" for result in others]
    sheet = Table("metric", title=f"median (least to greatest of {len(first.runs)})")
    for title in (*titles, *compared):
        sheet.add_column(title, justify="right")
    columns: list[tuple[Mapping[str, Spread], str]] = [
        *((over_repeats(result.metrics), "") for result in results),
        *((ratios(first.metrics, other.metrics), "x") for other in others),
    ]
    for name in _SHOWN:
        cells = [_cell(spreads.get(name), unit or _unit(name)) for spreads, unit in columns]
        if any(cells):
            sheet.add_row(name.removesuffix("_s") if _unit(name) == "s" else name, *cells)
    return sheet


def failures(results: Sequence[Result]) -> list[str]:
    """A line for each target with failed requests, counting them by kind."""
    counted = [(result.target.label, count_errors(result.runs)) for result in results]
    return [
        f"{label}: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        for label, kinds in counted
        if kinds
    ]


def _unit(name: str) -> str:
    return "s" if name.endswith("_s") and not name.endswith("_per_s") else ""


def _cell(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return ""
    scale, shown = (1e3, " ms") if unit == "s" else (1.0, unit)
    median, low, high = (
        f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        for value in (scale * spread.median, scale * spread.low, scale * spread.high)
    )
    return f"{median}{shown}" + (f" ({low} to {high})" if spread.low != spread.high else "")


def document(results: Sequence[Result], workload: Workload, load: str) -> dict[str, Any]:
    """The whole benchmark as plain data."""
    first, *others = results
    return {
        "schema": 1,
        "versions": versions(),
        "machine": machine(),
        "workload": {**asdict(workload), "load": load},
        "targets": [_target(result) for result in results],
        "ratios": {
            f"{other.target.label} / {first.target.label}": _plain(
                ratios(first.metrics, other.metrics)
            )
            for other in others
        },
    }


def _target(result: Result) -> dict[str, Any]:
    target = result.target
    return {
        "label": target.label,
        "model": Path(target.model).name,
        "endpoint": target.endpoint,
        "body": dict(target.body),
        "errors": dict(count_errors(result.runs)),
        "repeats": result.metrics,
        "over_repeats": _plain(over_repeats(result.metrics)),
    }


def _plain(spreads: Mapping[str, Spread]) -> dict[str, Any]:
    return {name: asdict(spread) for name, spread in spreads.items()}


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system and GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = _first_field(cpuinfo, "flags").split()
    return {
        "cpu": _first_field(cpuinfo, "model name") or platform.machine(),
        "cpu_family": _first_field(cpuinfo, "cpu family"),
        "cpu_model": _first_field(cpuinfo, "model\t"),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "num_cores": num_usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "gpus": [
            _first_field(path, "Model")
            for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        ],
    }


def _first_field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


# The image, which needs matplotlib, the `bench` extra.


def require_matplotlib() -> Any:
    """Matplotlib's figure class. Raises `ConfigError` with the command that installs it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib.") from error
    return Figure


def save_plot(results: Sequence[Result], path: Path) -> None:
    """Draw throughput, time to first token and gaps between tokens into a PNG file."""
    figure = require_matplotlib()(figsize=(12, 3.6), layout="constrained")
    bars, *curves = figure.subplots(1, 3)
    _draw_bars(bars, results)
    for axes, title, name in zip(
        curves, ("time to first token", "between tokens"), ("ttft", "gaps"), strict=True
    ):
        axes.set(title=title, xlabel="ms", ylabel="share of samples", ylim=(0, 1))
        for result in results:
            _draw_curve(axes, result, name)
        axes.legend()
    figure.savefig(path, dpi=150, format="png")


def _draw_bars(axes: Any, results: Sequence[Result]) -> None:
    axes.set(title="throughput", ylabel="output tokens / s")
    for result in results:
        spread = over_repeats(result.metrics)["output_tokens_per_s"]
        reach = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.bar(result.target.label, spread.median, yerr=reach, capsize=4)


def _draw_curve(axes: Any, result: Result, name: str) -> None:
    good = [sample for run in result.runs for sample in run.samples if not sample.error]
    values = (
        [sample.ttft_s for sample in good]
        if name == "ttft"
        else [gap for sample in good for gap in sample.gaps_s]
    )
    if values:
        axes.ecdf([1e3 * value for value in values], label=result.target.label)

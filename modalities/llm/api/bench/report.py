"""The output of a benchmark: tables, JSON, an image.

Owns the form of each, and the words for the metrics of `metrics`. The description of the machine
names no host and no address.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from triptych.core.errors import ConfigError
from triptych.core.process.threads import num_usable_cores
from triptych.core.process.versions import versions
from triptych.modalities.llm.api.bench.client import BenchServer
from triptych.modalities.llm.api.bench.load import Load, Run, Workload
from triptych.modalities.llm.api.bench.metrics import (
    NO_TARGETS,
    PERCENTILES,
    Goodput,
    Metrics,
    Spread,
    count_errors,
    over_repeats,
    ratios,
    summarize,
)

_TOTALS = {
    "num_requests": "Requests",
    "num_errors": "Failed requests",
    "elapsed_s": "Duration",
    "requests_per_s": "Requests per second",
    "goodput_per_s": "Good requests per second",
    "goodput_share": "Share of good requests",
    "prompt_tokens": "Input tokens",
    "output_tokens": "Output tokens",
    "prompt_tokens_per_s": "Input tokens per second",
    "output_tokens_per_s": "Output tokens per second",
    "total_tokens_per_s": "Total tokens per second",
    "prompt_tokens_mean": "Input tokens of a request",
    "cached_tokens_mean": "of these, cached",
    "output_tokens_mean": "Output tokens of a request",
}
_LATENCIES = {
    "ttft": "Time to first token",
    "itl": "Time between tokens",
    "tpot": "Time per output token",
    "e2e": "Whole request",
}
_SWEPT = {
    "requests_per_s": "requests /s",
    "goodput_share": "good %",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "ttft_p50_s": "TTFT ms p50",
    "ttft_p95_s": "TTFT ms p95",
    "itl_p50_s": "ITL ms p50",
    "itl_p95_s": "ITL ms p95",
    "num_errors": "failed",
}
"""The columns of a sweep, to fit into 80 characters."""
_INSTRUCTIONS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""The CPU features that decide the speed of matrix multiplication, widest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything measured on one target under one load, one run per repeat."""

    target: BenchServer
    runs: tuple[Run, ...]
    load: Load
    goodput: Goodput = NO_TARGETS

    @property
    def metrics(self) -> list[Metrics]:
        """Figures of each repeat."""
        return [summarize(run, self.goodput) for run in self.runs]


def table(results: Sequence[Result]) -> Table:
    """Medians with spread, under one load; with two targets or more, ratios to the first."""
    first, *others = results
    titles = [result.target.label for result in results]
    compared = [f"{result.target.label} / {first.target.label}" for result in others]
    num_repeats = len(first.runs)
    over = f", median (least to greatest) of {num_repeats} repeats" if num_repeats > 1 else ""
    sheet = Table("", title=f"{first.load}{over}", title_justify="left")
    for title in (*titles, *compared):
        sheet.add_column(title, justify="right")
    columns: list[tuple[Mapping[str, Spread], bool]] = [
        *((over_repeats(result.metrics), False) for result in results),
        *((ratios(first.metrics, other.metrics), True) for other in others),
    ]
    for label, name in _rows():
        cells = [
            _cell(spreads.get(name), "x" if is_ratio else _unit(name))
            for spreads, is_ratio in columns
        ]
        if any(cells):
            sheet.add_row(label, *cells)
    return sheet


def _rows() -> list[tuple[str, str]]:
    """The label and the metric of each row."""
    rows = [(label, name) for name, label in _TOTALS.items()]
    for name, label in _LATENCIES.items():
        rows.append((f"{label}, mean", f"{name}_mean_s"))
        rows += [(f"{label}, p{percent}", f"{name}_p{percent}_s") for percent in PERCENTILES]
    return rows


def sweep_table(results: Sequence[Result]) -> Table:
    """The medians of several loads, one line for each load and target."""
    has_several = len({result.target.label for result in results}) > 1
    found = [{n: s.median for n, s in over_repeats(each.metrics).items()} for each in results]
    names = [name for name in _SWEPT if any(name in metrics for metrics in found)]
    sheet = Table(title="medians of each load", title_justify="left", box=None, pad_edge=False)
    for title in ("server", "load") if has_several else ("load",):
        sheet.add_column(title, no_wrap=True)
    for name in names:
        sheet.add_column(_SWEPT[name], justify="right")
    for result, metrics in zip(results, found, strict=True):
        cells = [
            _number(metrics[name], _unit(name), "") if name in metrics else "" for name in names
        ]
        server = [result.target.label] if has_several else []
        sheet.add_row(*server, str(result.load), *cells)
    return sheet


def failures(results: Sequence[Result]) -> list[str]:
    """A line for each target and load with failed requests, counting them by kind."""
    counted = [(result, count_errors(result.runs)) for result in results]
    return [
        f"{result.target.label}, {result.load}: "
        + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        for result, kinds in counted
        if kinds
    ]


def _unit(name: str) -> str:
    if name == "goodput_share":
        return "%"
    if name == "elapsed_s":
        return "s"
    return "ms" if name.endswith("_s") and not name.endswith("_per_s") else ""


def _cell(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return ""
    text = _number(spread.median, unit)
    if spread.low == spread.high:
        return text
    return f"{text} ({_number(spread.low, unit, '')} to {_number(spread.high, unit, '')})"


def _number(value: float, unit: str, shown: str | None = None) -> str:
    """A number in `unit`, which is also shown unless `shown` is given."""
    scaled = value * {"ms": 1e3, "%": 100}.get(unit, 1)
    text = f"{scaled:.3g}" if abs(scaled) < 1000 else f"{scaled:,.0f}"
    space = " " if unit in ("s", "ms", "%") else ""
    return text + (f"{space}{unit}" if shown is None else shown)


def document(
    results: Sequence[Result], workload: Workload | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole benchmark as plain data; `settings` are the command's.

    There is no `workload` where prompts are those of a file.
    """
    loads = list(dict.fromkeys(result.load for result in results))
    return {
        "schema": 2,
        "versions": versions(),
        "machine": machine(),
        "settings": dict(settings),
        **({"workload": asdict(workload)} if workload is not None else {}),
        "loads": [_load(load, [each for each in results if each.load == load]) for load in loads],
    }


def _load(load: Load, results: Sequence[Result]) -> dict[str, Any]:
    first, *others = results
    return {
        "load": str(load),
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

"""What a benchmark says: a table for people, JSON for machines.

Owns the form of both. The description of the machine names no host and no address.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from triptych.core.threads import num_usable_cores
from triptych.core.versions import versions
from triptych.modalities.llm.api.bench.client import BenchServer
from triptych.modalities.llm.api.bench.load import Run
from triptych.modalities.llm.api.bench.stats import (
    Metrics,
    Spread,
    count_errors,
    over_repeats,
    ratios,
    summarize,
)
from triptych.modalities.llm.api.bench.workload import Workload

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
"""What decides how fast a processor multiplies matrices, widest first."""


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
        _figure(scale * value) for value in (spread.median, spread.low, spread.high)
    )
    return f"{median}{shown}" + (f" ({low} to {high})" if spread.low != spread.high else "")


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


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

"""A benchmark as a picture. Needs matplotlib, the `bench` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.core.errors import ConfigError
from triptych.modalities.llm.api.bench.report import Result
from triptych.modalities.llm.api.bench.stats import over_repeats


def require() -> Any:
    """The drawing library; ConfigError with what to type where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'triptych[bench]'.") from error
    return Figure


def save(results: Sequence[Result], path: Path) -> None:
    """Draw throughput, time to first token and gaps between tokens into a PNG file."""
    figure = require()(figsize=(12, 3.6), layout="constrained")
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

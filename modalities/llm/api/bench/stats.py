"""From samples to figures: percentiles of one repeat, median and spread over repeats, ratios.

Owns the definition of each metric. Metric names end in their unit.

    ttft      sent to first piece of text
    itl       between pieces of text, over all requests
    tpot      first piece to end, per further token, of each request
    e2e       sent to end
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.modalities.llm.api.bench.client import RequestRecord
from triptych.modalities.llm.api.bench.load import Run

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
    num_output = sum(sample.num_output_tokens for sample in good)
    latencies = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "tpot": [_tpot_s(sample) for sample in good if sample.num_output_tokens > 1],
        "e2e": [sample.e2e_s for sample in good],
    }
    return {
        "output_tokens_per_s": num_output / run.elapsed_s,
        "requests_per_s": len(good) / run.elapsed_s,
        **{
            f"{name}_p{percent}_s": value
            for name, values in latencies.items()
            for percent, value in percentiles(values).items()
        },
        **_means(good),
        "elapsed_s": run.elapsed_s,
        "num_errors": len(run.samples) - len(good),
    }


def _tpot_s(sample: RequestRecord) -> float:
    return (sample.ended_s - sample.arrivals_s[0]) / (sample.num_output_tokens - 1)


def _means(good: Sequence[RequestRecord]) -> Metrics:
    """Mean token counts; those of prompts only where the server told them."""
    counts = {"output": [sample.num_output_tokens for sample in good]}
    if any(sample.num_prompt_tokens for sample in good):
        counts["prompt"] = [sample.num_prompt_tokens for sample in good]
        counts["cached"] = [sample.num_cached_tokens for sample in good]
    return {f"{name}_tokens_mean": statistics.fmean(each) for name, each in counts.items() if each}


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

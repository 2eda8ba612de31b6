"""From the records of requests to figures.

Owns the definition of each metric; names end in their unit.

    ttft      sent to first piece of text
    itl       between pieces of text, over all requests
    tpot      first piece to end, per further token, of each request
    e2e       sent to end
    goodput   requests that meet every target of a `Goodput`
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from triptych.core.errors import ConfigError
from triptych.modalities.llm.api.bench.client import RequestRecord
from triptych.modalities.llm.api.bench.load import Run

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2e")
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """The most seconds of each latency of a good request, by name."""

    targets_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Read entries such as `ttft:500`, in milliseconds. Raises `ConfigError`."""
        targets_s = {}
        for entry in entries:
            name, _, limit = entry.partition(":")
            name = name.removesuffix("l") if name == "e2el" else name
            try:
                limit_ms = float(limit)
            except ValueError:
                limit_ms = 0.0
            if name not in LATENCIES or not limit_ms > 0:
                raise ConfigError(
                    f"--goodput {entry}: write {', '.join(LATENCIES)} with milliseconds, as in"
                    " ttft:500 itl:50."
                )
            targets_s[name] = limit_ms / 1000
        return cls(targets_s)

    def is_met(self, sample: RequestRecord) -> bool:
        """Whether a request meets every target; of its gaps (`itl`), the longest counts."""
        found = {
            "ttft": sample.ttft_s,
            "itl": max(sample.gaps_s, default=0.0),
            "tpot": _tpot_s(sample) or 0.0,
            "e2e": sample.e2e_s,
        }
        return all(found[name] <= limit_s for name, limit_s in self.targets_s.items())


NO_TARGETS = Goodput()


def summarize(run: Run, goodput: Goodput = NO_TARGETS) -> Metrics:
    """Figures of one repeat; latencies are absent where no request succeeded."""
    good = [sample for sample in run.samples if not sample.error]
    tpots = (_tpot_s(sample) for sample in good)
    latencies = {
        "ttft": [sample.ttft_s for sample in good],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "tpot": [value for value in tpots if value is not None],
        "e2e": [sample.e2e_s for sample in good],
    }
    figures = {
        "num_requests": len(run.samples),
        "num_errors": len(run.samples) - len(good),
        "elapsed_s": run.elapsed_s,
        "requests_per_s": len(good) / run.elapsed_s,
        **_token_counts(good, run.elapsed_s),
    }
    if goodput.targets_s:
        num_met = sum(map(goodput.is_met, good))
        figures["goodput_per_s"] = num_met / run.elapsed_s
        figures["goodput_share"] = num_met / max(1, len(run.samples))
    for name, values in latencies.items():
        if values:
            figures[f"{name}_mean_s"] = statistics.fmean(values)
        for percent, value in percentiles(values).items():
            figures[f"{name}_p{percent}_s"] = value
    return figures


def _tpot_s(sample: RequestRecord) -> float | None:
    num_further = sample.num_output_tokens - 1
    return (sample.ended_s - sample.arrivals_s[0]) / num_further if num_further > 0 else None


def _token_counts(good: Sequence[RequestRecord], elapsed_s: float) -> Metrics:
    """Sums, means and tokens per second; of prompts only where the server reports them."""
    num_output = sum(sample.num_output_tokens for sample in good)
    num_prompt = sum(sample.num_prompt_tokens for sample in good)
    found: Metrics = {
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / elapsed_s,
    }
    if num_prompt:
        found |= {
            "prompt_tokens": num_prompt,
            "prompt_tokens_per_s": num_prompt / elapsed_s,
            "total_tokens_per_s": (num_prompt + num_output) / elapsed_s,
            "prompt_tokens_mean": num_prompt / len(good),
            "cached_tokens_mean": sum(sample.num_cached_tokens for sample in good) / len(good),
        }
    if good:
        found["output_tokens_mean"] = num_output / len(good)
    return found


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

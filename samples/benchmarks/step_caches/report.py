"""The table and the plot of the results.

Owns the summary of cells: means with the spread over prompts, and the computed steps that a
method needs for a quality, interpolated between the measured ones. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from step_caches.results import Cell, Reference, Results

TARGETS_DB = (20, 25, 30, 35)
"""Mean PSNR of the tables of equal quality."""
_PLANNED = "planned"
_FIRST = ("", "computed", "PSNR, mean (10 %, 90 %)")
_COLUMNS = (*_FIRST, "SSIM", "features", "named right", "processor time", "planned wins")


def markdown(results: Results) -> str:
    """A table for each way of sampling, then one for equal quality."""
    parts = [f"{results.terms}\n"]
    for sampling, methods in results.samplings.items():
        reference = results.reference(sampling)
        parts.append(f"{_title(sampling)}\n\n{_seeds(reference)}\n")
        parts.append(_table(_COLUMNS, _rows(methods, reference)))
    heads = ("", *(f"{target} dB" for target in TARGETS_DB))
    for sampling, methods in results.samplings.items():
        parts.append(f"Steps that compute for a mean PSNR, {_title(sampling)}:\n")
        parts.append(_table(heads, _needed_rows(methods)))
    return "\n".join(parts)


def save_plot(results: Results, path: Path) -> None:
    """Mean PSNR over computed steps, a panel for each way of sampling."""
    samplings = results.samplings
    if not samplings:
        return
    mpl.use("Agg")
    steps = list(dict.fromkeys(name.split()[0] for name in samplings))
    kinds = list(dict.fromkeys(name.split()[1] for name in samplings))
    size = (4 * len(steps), 3.2 * len(kinds))
    figure, axes = plt.subplots(len(kinds), len(steps), figsize=size, squeeze=False)
    for name, methods in samplings.items():
        count, kind = name.split()
        axis = axes[kinds.index(kind)][steps.index(count)]
        for method, cells in methods.items():
            means = [fmean(cell.psnr_db) for cell in cells.values()]
            runs = [fmean(cell.num_runs) for cell in cells.values()]
            style = {"linewidth": 2.4} if method == _PLANNED else {"linestyle": "--"}
            axis.plot(runs, means, marker="o", markersize=3, label=method, **style)
        axis.set(title=_title(name), xlabel="steps computed", ylabel="PSNR to uncached, dB")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def needed(cells: Mapping[int, Cell], target_db: float) -> str:
    """Computed steps for a mean PSNR, between those measured; "-" where it is not reached.

    No more than the fewest measured, where these are already enough.
    """
    points = sorted((fmean(cell.num_runs), fmean(cell.psnr_db)) for cell in cells.values())
    for index, (runs, reached_db) in enumerate(points):
        if reached_db >= target_db:
            if index == 0:
                return f"≤ {runs:.1f}"
            runs_before, db_before = points[index - 1]
            share = (target_db - db_before) / (reached_db - db_before)
            return f"{runs_before + share * (runs - runs_before):.1f}"
    return "-"


def _rows(
    methods: Mapping[str, Mapping[int, Cell]], reference: Reference
) -> Iterator[tuple[str, ...]]:
    counts = sorted({count for cells in methods.values() for count in cells})
    apart = fmean(reference.seeds_features)
    for count in counts:
        planned = methods.get(_PLANNED, {}).get(count)
        present = [(name, cells[count]) for name, cells in methods.items() if count in cells]
        for name, cell in sorted(present, key=lambda item: -fmean(item[1].psnr_db)):
            low, high = np.quantile(cell.psnr_db, [0.1, 0.9])
            yield (
                name,
                f"{fmean(cell.num_runs):.1f}",
                f"{fmean(cell.psnr_db):.1f} dB ({low:.1f}, {high:.1f})",
                f"{fmean(cell.ssim):.3f}",
                f"{fmean(cell.features) / apart:.0%}",
                f"{cell.right:.0%}",
                "" if cell.cpu_share is None else f"{cell.cpu_share:.0%}",
                "" if planned is None or name == _PLANNED else _wins(planned, cell),
            )


def _wins(planned: Cell, other: Cell) -> str:
    pairs = list(zip(planned.psnr_db, other.psnr_db, strict=True))
    return f"{sum(ours > theirs for ours, theirs in pairs)} of {len(pairs)}"


def _needed_rows(methods: Mapping[str, Mapping[int, Cell]]) -> Iterator[tuple[str, ...]]:
    for name, cells in methods.items():
        yield (name, *(needed(cells, target) for target in TARGETS_DB))


def _title(sampling: str) -> str:
    count, kind = sampling.split()
    return f"{count} steps, {'with' if kind == 'guided' else 'without'} guidance"


def _seeds(reference: Reference) -> str:
    return (
        f"Uncached images: {reference.right:.0%} named right. Two seeds of a prompt are"
        f" {fmean(reference.seeds_psnr_db):.1f} dB apart, and"
        f" {fmean(reference.seeds_features):.3f} in features (100 % below)."
    )


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

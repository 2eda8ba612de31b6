"""The chart in README.md: tokens per second of five servers, as measured in docs/benchmarks.

python docs/peers_chart.py      # needs matplotlib

Owns the form of the chart. Its figures are medians of the repeats in a file that
`samples/benchmarks/chat_peers.py` wrote; it measures nothing. The first and the last row of that
file are both Triptych: the chart has the first, the slower one.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "benchmarks" / "chat_peers_zen_5.json"
TARGET = FOLDER / "images" / "chat_peers.svg"
SCENES = {
    "1 stream": ("one stream", "decode_tokens_per_s"),
    "8 streams": ("8 streams", "output_tokens_per_s"),
    "32 streams": ("32 streams", "output_tokens_per_s"),
}
"""By title, the scene of the file and its figure: one stream is timed after its first token."""
OURS, PEER, INK = "#7c3aed", "#b6bcc6", "#59636e"
CAPTION = (
    "Tokens per second; longer is better. SmolLM2-135M, 16 bits, two Zen 5 cores, November 2026."
)


def rates(server: dict[str, Any]) -> list[float]:
    """Median tokens per second of each scene."""
    return [
        median(repeat[figure] for repeat in server["repeats"][scene])
        for scene, figure in SCENES.values()
    ]


def draw(servers: list[tuple[str, list[float]]]) -> Figure:
    """Bars of every server, a panel for each scene."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    figure.patch.set_alpha(0)
    names = [name for name, _ in servers]
    for column, (panel, title) in enumerate(
        zip(figure.subplots(1, len(SCENES), sharey=True), SCENES, strict=True)
    ):
        values = [of_server[column] for _, of_server in servers]
        colors = [OURS if name == "Triptych" else PEER for name in names]
        bars = panel.barh(names, values, color=colors, height=0.7)
        panel.bar_label(bars, fmt="%.0f", padding=4, color=INK)
        panel.set_title(title, loc="left", color=INK, fontsize=11)
        panel.set_xlim(0, max(values) * 1.2)
        panel.invert_yaxis()
        panel.set_facecolor("none")
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0, labelbottom=False, labelcolor=INK)
    figure.supxlabel(CAPTION, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def main() -> None:
    """Write the chart."""
    found: dict[str, list[float]] = {}
    for server in json.loads(SOURCE.read_text(encoding="utf-8"))["servers"]:
        found.setdefault(server["label"], rates(server))
    mpl.rcParams |= {
        "svg.hashsalt": "triptych",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
    }
    draw(list(found.items())).savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()

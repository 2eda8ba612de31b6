"""Embeddings against sentence-transformers: the same weights, texts and process, taking turns.

    pip install sentence-transformers
    python samples/benchmarks/embeddings.py

A thousand texts of mixed length through the embedded model (MiniLM), in float32, where the vectors
must be equal, and in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer

from triptych import EmbeddingPipeline
from triptych.core.options.config import ModelOptions
from triptych.core.weights.packages import run_installer
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.embedding.source import MINILM

Vectors = npt.NDArray[np.float32]
Embed = Callable[[list[str]], Vectors]


def make_texts(number: int) -> list[str]:
    """Texts of a few to a few hundred words, most of them short."""
    random_source = random.Random(0)
    words = [
        "the",
        "a",
        "of",
        "river",
        "stone",
        "letter",
        "market",
        "winter",
        "blue",
        "under",
        "quickly",
        "seven",
        "house",
    ]
    lengths = [min(180, 2 + int(random_source.lognormvariate(2.8, 0.9))) for _ in range(number)]
    return [" ".join(random_source.choices(words, k=length)) for length in lengths]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    texts = make_texts(args.texts)
    folder, _ = MINILM.fetch(ModelOptions(), SilentProgress(), run_installer)
    theirs = SentenceTransformer(str(folder), device="cpu")
    exact = EmbeddingPipeline.from_pretrained(progress=False, dtype="float32", device="cpu")
    short = EmbeddingPipeline.from_pretrained(progress=False, dtype="bfloat16", device="cpu")
    sides: dict[str, Embed] = {
        "sentence-transformers": lambda texts: np.asarray(theirs.encode(texts), np.float32),
        "ours, float32": exact,
        "ours, bfloat16": short,
    }
    vectors = {name: embed(texts) for name, embed in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, embed in sides.items():
            started_s = time.perf_counter()
            embed(texts)
            seconds[name].append(time.perf_counter() - started_s)
    reference, base = vectors["sentence-transformers"], seconds["sentence-transformers"]
    table = Table("", "texts/s", "times as fast: median", "lowest", "highest", "largest difference")
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(base, values, strict=True)]
        table.add_row(
            name,
            f"{len(texts) / statistics.median(values):.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            f"{np.abs(vectors[name] - reference).max():.1e}",
        )
    Console().print(table)
    exact.close()
    short.close()


if __name__ == "__main__":
    main()

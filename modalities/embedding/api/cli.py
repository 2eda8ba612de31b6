"""`triptych embed`: the embedding pipeline at a terminal.

Owns what the command reads, prints and writes. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from triptych.core.cli_io import count_bar
from triptych.core.errors import ConfigError
from triptych.core.options.table import add_options
from triptych.modalities.embedding.api.pipeline import EmbeddingPipeline
from triptych.modalities.embedding.api.service import Floats

_STDIN = "-"


def add_embed_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych embed`."""
    parser.add_argument("text", nargs="*", help="texts; none: one per line of --input or stdin")
    parser.add_argument("-i", "--input", help='file with a text on each line; "-": stdin')
    parser.add_argument(
        "-o", "--output", help="write .npy (an array) or .jsonl; default: JSONL to stdout"
    )
    parser.add_argument("--dimensions", type=int, default=0, help="shorten vectors to so many")
    parser.add_argument("--prompt-name", default="", help="one of the model's own instructions")
    parser.add_argument("--cut", action="store_true", help="cut texts that are too long")
    parser.add_argument(
        "--similar-to", metavar="TEXT", help="print texts by likeness to this one, most alike first"
    )
    add_options(
        parser,
        sections=("models", "device", "cache", "schedule"),
        roles=("embedding",),
        exclude=("idle_unload_s", "load", "pool_embeddings"),  # texts are pooled here
    )


def run_embed(args: argparse.Namespace) -> int:
    """Turn texts into vectors, or put them in order."""
    if args.dimensions < 0:
        raise ConfigError("--dimensions is above 0.")
    if args.output and Path(args.output).suffix not in (".npy", ".jsonl"):
        raise ConfigError("--output ends with .npy or .jsonl.")
    if args.output and args.similar_to:
        raise ConfigError("--similar-to prints; leave --output out.")
    texts = _read_texts(args)
    options = {
        "dimensions": args.dimensions,
        "prompt_name": args.prompt_name,
        "max_tokens": -1 if args.cut else 0,
    }
    with EmbeddingPipeline.from_arguments(args) as embed, count_bar(is_transient=True) as bar:
        task = bar.add_task("Embedding", total=len(texts))
        vectors = embed(texts, **options, on_progress=lambda n: bar.update(task, completed=n))
        if args.similar_to:
            of = embed(args.similar_to, **options)[0]
            norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(of)
            cosines: list[float] = (vectors @ of / np.maximum(norms, 1e-12)).tolist()
            for text, value in sorted(zip(texts, cosines, strict=True), key=lambda it: -it[1]):
                sys.stdout.write(f"{value:6.3f}  {text}\n")
            return 0
    _write(args.output, texts, vectors)
    return 0


def _read_texts(args: argparse.Namespace) -> list[str]:
    if args.text and args.input:
        raise ConfigError("Give texts or --input, not both.")
    if args.text:
        return list(args.text)
    if (args.input or _STDIN) == _STDIN:
        if sys.stdin.isatty():
            raise ConfigError("Nothing to embed: give texts, or pipe lines in.")
        lines = sys.stdin.read().splitlines()
    else:
        try:
            lines = Path(args.input).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{args.input} cannot be read as lines of text.") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ConfigError("There is no text in the input.")
    return texts


def _write(output: str | None, texts: Sequence[str], vectors: Floats) -> None:
    if output and Path(output).suffix == ".npy":
        np.save(output, vectors, allow_pickle=False)
        return
    rows = (
        json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False)
        for text, vector in zip(texts, vectors, strict=True)
    )
    lines = "".join(f"{row}\n" for row in rows)
    if output:
        Path(output).write_text(lines, encoding="utf-8")
    else:
        sys.stdout.write(lines)

"""`triptych embed`: the embedding pipeline on the command line.

Owns the command's input and output. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from triptych.core.bulk.cluster_options import add_cluster_options, model_of, read_cluster
from triptych.core.bulk.results import PrintedResults, ResultFile
from triptych.core.bulk.rows import BulkRow, assign_keys, read_rows
from triptych.core.bulk.run import BulkRun
from triptych.core.bulk.work import Cluster, RowWork
from triptych.core.client.choice import Wanted, add_server_options, open_model
from triptych.core.errors import ConfigError
from triptych.core.options.table import add_options
from triptych.core.process.cli_io import STDIN, count_bar, report_write_errors
from triptych.modalities.embedding.modality import EMBEDDING

_BLOCK = 1024  # rows per block sent to an engine of a cluster
_WANTED = Wanted(
    task=EMBEDDING.task[0],
    default=EMBEDDING.default,
    pipeline="triptych.modalities.embedding.api.pipeline:EmbeddingPipeline",
    remote="triptych.modalities.embedding.api.remote:RemoteEmbedder",
    has_seed=False,
)


def add_embed_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych embed`."""
    parser.add_argument("text", nargs="*", help="texts; none: one per line of --input or stdin")
    parser.add_argument(
        "-i",
        "--input",
        help='file with one text per line, "-": stdin; or .jsonl, or a folder of .jsonl files: one'
        ' {"text": ...} per line, or lines of an OpenAI batch for /v1/embeddings',
    )
    parser.add_argument(
        "-o",
        "--output",
        help="write .npy (an array), or .jsonl, which a second run resumes;"
        " default: JSONL to stdout",
    )
    parser.add_argument("--dimensions", type=int, default=0, help="shorten vectors to this length")
    parser.add_argument("--prompt-name", default="", help="one of the model's own instructions")
    parser.add_argument("--cut", action="store_true", help="truncate texts that are too long")
    parser.add_argument(
        "--similar-to",
        metavar="TEXT",
        help="print texts by similarity to this one, most similar first",
    )
    add_server_options(parser)
    add_cluster_options(parser)
    add_options(
        parser,
        sections=("models", "device", "cache", "schedule"),
        roles=("embedding",),
        exclude=("idle_unload_s", "load", "pool_embeddings"),  # texts are pooled here
    )


def run_embed(args: argparse.Namespace) -> int:
    """Embed texts, or rank them by similarity."""
    if args.dimensions < 0:
        raise ConfigError("--dimensions must be above 0.")
    if args.output and Path(args.output).suffix not in (".npy", ".jsonl"):
        raise ConfigError("--output must end with .npy or .jsonl.")
    if args.output and args.similar_to:
        raise ConfigError("--similar-to prints its result; omit --output.")
    cluster = read_cluster(args)
    if cluster and not (args.output or "").endswith(".jsonl"):
        raise ConfigError("--ray-address needs a .jsonl output file, such as -o vectors.jsonl.")
    options = {
        "dimensions": args.dimensions,
        "prompt_name": args.prompt_name,
        "max_tokens": -1 if args.cut else 0,
    }
    if args.similar_to or (args.output or "").endswith(".npy"):
        _embed_at_once(args, options)
        return 0
    return _bulk(args, options, cluster).run("embedded")


def _open_pipeline(args: argparse.Namespace) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = open_model(args, _WANTED)
    return opened


def _embed_at_once(args: argparse.Namespace, options: Any) -> None:
    """Write an array of all vectors, or print texts by similarity to one."""
    if _has_rows(args):
        raise ConfigError("JSON Lines input needs JSON Lines output: end --output with .jsonl.")
    texts = _read_texts(args)
    with _open_pipeline(args) as embed, count_bar(is_transient=True) as bar:
        task = bar.add_task("Embedding", total=len(texts))
        vectors = embed(texts, **options, on_progress=lambda n: bar.update(task, completed=n))
        if args.output:
            with report_write_errors(args.output):
                np.save(args.output, vectors, allow_pickle=False)
            return
        of = embed(args.similar_to, **options)[0]
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(of)
    cosines: list[float] = (vectors @ of / np.maximum(norms, 1e-12)).tolist()
    for text, value in sorted(zip(texts, cosines, strict=True), key=lambda it: -it[1]):
        sys.stdout.write(f"{value:6.3f}  {text}\n")


def _bulk(args: argparse.Namespace, options: dict[str, Any], cluster: Cluster | None) -> BulkRun:
    """A bulk run with one row per text."""
    if _has_rows(args):
        rows = read_rows("--input", args.input, "/v1/embeddings")
    else:
        entries = [{"text": text} for text in _read_texts(args)]
        rows = [
            BulkRow(number=n, entry=each, asked=each) for n, each in enumerate(entries, start=1)
        ]
    return BulkRun(
        rows=assign_keys(rows, {"model": model_of(args, EMBEDDING.default), "options": options}),
        work=RowWork(
            pipeline=_WANTED.pipeline,
            answer="triptych.modalities.embedding.api.rows:answer_rows",
            options=options,
            num_at_once=_BLOCK,
        ),
        sink=ResultFile(Path(args.output).expanduser()) if args.output else PrintedResults(),
        open_pipeline=lambda: _open_pipeline(args),
        cluster=cluster,
        is_bar_hidden=args.output is None and sys.stdout.isatty(),
    )


def _has_rows(args: argparse.Namespace) -> bool:
    """Whether the input is JSON Lines: a .jsonl file, or a folder."""
    path = Path(args.input or "")
    return path.suffix == ".jsonl" or (bool(args.input) and path.expanduser().is_dir())


def _read_texts(args: argparse.Namespace) -> list[str]:
    if args.text and args.input:
        raise ConfigError("Give texts or --input, not both.")
    if args.text:
        return list(args.text)
    if (args.input or STDIN) == STDIN:
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

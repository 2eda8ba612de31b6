"""`triptych generate`: a batch of prompts, from arguments or JSONL to JSONL.

Owns the command's rows and output. A server's model or the pipeline answers.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from triptych.core.bulk.cluster_options import add_cluster_options, model_of, read_cluster
from triptych.core.bulk.results import PrintedResults, ResultFile
from triptych.core.bulk.rows import BulkRow, assign_keys, read_rows
from triptych.core.bulk.run import BulkRun
from triptych.core.bulk.work import RowWork
from triptych.core.client.choice import Wanted, open_model
from triptych.core.errors import ConfigError
from triptych.modalities.llm.api.cli import add_common, call_options
from triptych.modalities.llm.modality import CHAT

_WANTED = Wanted(
    task=CHAT.task[0],
    default=CHAT.default,
    pipeline="triptych.modalities.llm.api.pipeline:ChatPipeline",
    remote="triptych.modalities.llm.api.remote:RemoteChat",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych generate`."""
    parser.add_argument("prompt", nargs="*", help="prompts, answered independently")
    parser.add_argument(
        "-i",
        "--input",
        help='JSONL file, folder of them, or "-" for stdin: one {"prompt": ...} or'
        ' {"messages": [...]} per line, or lines of an OpenAI batch for /v1/chat/completions;'
        ' "id" and "custom_id" come back as they are, further fields are call options'
        " (max_tokens, temperature, ...)",
    )
    parser.add_argument("-o", "--output", help="JSONL file to write or to resume; default stdout")
    parser.add_argument("--batch", type=int, default=64, help="lines in flight at once")
    add_cluster_options(parser)
    add_common(parser, "chat")


def run(args: argparse.Namespace) -> int:
    """Answer a batch of prompts, with progress. A bad line becomes an error line."""
    if args.batch < 1:
        raise ConfigError("--batch must be at least 1.")
    cluster = read_cluster(args)
    if cluster and not args.output:
        raise ConfigError("--ray-address needs an output file: -o answers.jsonl.")
    options = {**call_options(args), "num_in_flight": args.batch}
    rows = _read_rows(args)
    shared = {"model": model_of(args, CHAT.default), "options": call_options(args)}
    run = BulkRun(
        rows=assign_keys(rows, shared),
        work=RowWork(
            pipeline=_WANTED.pipeline,
            answer="triptych.modalities.llm.api.rows:answer_rows",
            options=options,
            num_at_once=args.batch,
        ),
        sink=ResultFile(Path(args.output).expanduser()) if args.output else PrintedResults(),
        open_pipeline=lambda: _open_pipeline(args),
        cluster=cluster,
        is_bar_hidden=args.output is None and sys.stdout.isatty(),  # answers are progress enough
    )
    return run.run("answered")


def _open_pipeline(args: argparse.Namespace) -> AbstractContextManager[Any]:
    opened: AbstractContextManager[Any] = open_model(args, _WANTED)
    return opened


def _read_rows(args: argparse.Namespace) -> list[BulkRow]:
    rows = [
        BulkRow(number=number, entry={"prompt": prompt}, asked={"prompt": prompt})
        for number, prompt in enumerate(args.prompt, start=1)
    ]
    if args.input:
        found = read_rows("--input", args.input, "/v1/chat/completions")
        rows += [replace(row, number=row.number + len(args.prompt)) for row in found]
    if not rows:
        raise ConfigError("No prompts: give some as arguments, or a JSONL file with --input.")
    return rows

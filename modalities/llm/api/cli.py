"""`triptych chat` and `triptych generate`: the chat pipeline at a terminal.

Owns the input and output of these commands. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from triptych.core.bulk.results import PrintedResults, ResultFile
from triptych.core.bulk.rows import BulkRow, assign_keys, read_rows
from triptych.core.bulk.run import BulkRun, add_cluster_options, model_of, read_cluster
from triptych.core.bulk.work import RowWork
from triptych.core.errors import ConfigError, RequestError
from triptych.core.options.declaration import Role
from triptych.core.options.table import add_options
from triptych.modalities.llm.api.multimodal import Message
from triptych.modalities.llm.api.pipeline import ChatPipeline

_HELP = (
    "[dim]/image FILE[/] shows an image, [dim]/reset[/] forgets the conversation, [dim]/exit[/] or"
    " Ctrl-D leaves."
)
_IMAGE = "/image "


def add_common(parser: argparse.ArgumentParser, *roles: Role) -> None:
    """Declare the common options of commands that answer, for models of `roles`."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, help="max tokens of an answer")
    sampling.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    sampling.add_argument("--top-p", type=float, help="nucleus sampling")
    sampling.add_argument("--request-seed", type=int, metavar="SEED", help="repeat a past answer")
    sampling.add_argument("--stop", action="append", default=[], help="stop text; repeat")
    form = parser.add_argument_group("response format").add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON object")
    form.add_argument("--json-schema", metavar="FILE", help="JSON that a schema describes")
    form.add_argument("--regex", metavar="PATTERN", help="text that a regular expression matches")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these; repeat")
    form.add_argument("--grammar", metavar="FILE", help="text of a grammar, Lark's or GBNF")
    add_options(parser, sections=("models", "device", "cache", "schedule", "vision"), roles=roles)


def call_options(args: argparse.Namespace) -> dict[str, Any]:
    """The call options in the arguments."""
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.request_seed,
        "stop": tuple(args.stop),
        "structured_outputs": _form(args),
    }
    return {name: value for name, value in options.items() if value is not None}


def _form(args: argparse.Namespace) -> dict[str, Any] | None:
    """The response format in the arguments."""
    asked = {
        "json_object": args.json or None,
        "json": args.json_schema and _read_form("--json-schema", args.json_schema),
        "regex": args.regex,
        "choice": args.choice,
        "grammar": args.grammar and _read_form("--grammar", args.grammar),
    }
    return {name: value for name, value in asked.items() if value is not None} or None


def _read_form(option: str, file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{option} {file}: cannot be read ({reason}).") from error


def _open_pipeline(args: argparse.Namespace) -> ChatPipeline:
    return ChatPipeline.from_arguments(args)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych chat`."""
    parser.add_argument("prompt", nargs="*", help="answer this prompt (or piped input) and exit")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image to send first; repeat"
    )
    add_common(parser, "chat", "vision")


def run_chat(
    args: argparse.Namespace,
    open_pipeline: Callable[[argparse.Namespace], ChatPipeline] | None = None,
) -> int:
    """Answer an argument or piped input once, or hold a conversation on a terminal.

    Images are taken if the pipeline that `open_pipeline` opens takes them.
    """
    opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    prompt = " ".join(args.prompt) or ("" if sys.stdin.isatty() else sys.stdin.read().strip())
    if not prompt and not sys.stdin.isatty():
        raise ConfigError("No prompt: give one as an argument, or pipe one in.")
    with (open_pipeline or _open_pipeline)(args) as pipeline:
        if prompt:
            messages = [*opening, _read_turn(prompt, args.image)]
            for piece in pipeline.stream(messages, **call_options(args)):
                show(piece)
            show("\n")
        else:
            _converse(pipeline, opening, args)
    return 0


def _read_turn(text: str, images: Sequence[str]) -> Message:
    """A user's message with its images."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, str]] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def show(text: str) -> None:
    """Print a piece of an answer immediately."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _converse(pipeline: ChatPipeline, opening: list[Message], args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    console.print(_HELP)
    messages, images = list(opening), list(args.image)
    for line in _lines(console):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            console.print("[dim]Forgotten.[/]")
            continue
        if line.startswith(_IMAGE):
            images.append(line.removeprefix(_IMAGE).strip())
            console.print("[dim]It is sent with your next message.[/]")
            continue
        messages.append(_read_turn(line, images))
        images = []
        try:
            answer = _answer(pipeline, messages, args)
        except (RequestError, ConfigError) as error:
            console.print(f"[red]{escape(error.message)}[/] /reset starts over.")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(pipeline: ChatPipeline, messages: list[Message], args: argparse.Namespace) -> str:
    """Print the answer while it is generated; Ctrl-C ends the answer, not the conversation."""
    pieces: list[str] = []
    with suppress(KeyboardInterrupt):
        for piece in pipeline.stream(messages, **call_options(args)):
            pieces.append(piece)
            show(piece)
    show("\n")
    return "".join(pieces)


def _lines(console: Console) -> Iterator[str]:
    with suppress(ImportError):  # where there is none, lines have no arrow keys and no history
        import readline  # noqa: F401 - `input` uses it once it is loaded
    while True:
        try:
            line = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line:
            yield line


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_generate(args: argparse.Namespace) -> int:
    """Answer a batch of prompts, with progress. A bad line becomes an error line."""
    if args.batch < 1:
        raise ConfigError("--batch must be at least 1.")
    cluster = read_cluster(args)
    if cluster and not args.output:
        raise ConfigError("--ray-address needs an output file: -o answers.jsonl.")
    options = {**call_options(args), "num_in_flight": args.batch}
    rows = _read_rows(args)
    shared = {"model": model_of(args), "options": call_options(args)}
    run = BulkRun(
        rows=assign_keys(rows, shared),
        work=RowWork(
            pipeline="triptych.modalities.llm.api.pipeline:ChatPipeline",
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

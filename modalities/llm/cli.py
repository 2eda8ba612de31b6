"""`triptych chat` and `triptych generate`: the chat pipeline at a terminal.

Owns what these commands print and read. Everything else is the pipeline's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from triptych.core.errors import ConfigError, RequestError
from triptych.core.options import add_options, resolve
from triptych.core.weights.progress import RichProgress
from triptych.modalities.llm.pipeline import ChatPipeline, Message

_HELP = """[dim]/reset[/] forgets the conversation, [dim]/exit[/] or Ctrl-D leaves."""


def _add_common(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    sampling.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    sampling.add_argument("--top-p", type=float, help="nucleus sampling")
    sampling.add_argument("--request-seed", type=int, metavar="SEED", help="repeat a past answer")
    sampling.add_argument("--stop", action="append", default=[], help="end at this text; repeat")
    add_options(parser, sections=("models", "device", "cache", "schedule"))


def _call_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.request_seed,
        "stop": tuple(args.stop),
    }
    return {name: value for name, value in options.items() if value is not None}


def _open_pipeline(args: argparse.Namespace) -> ChatPipeline:
    return ChatPipeline.from_config(resolve(args), RichProgress())


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych chat`."""
    parser.add_argument("prompt", nargs="*", help="ask this and leave; without it, a conversation")
    parser.add_argument("--system", help="instructions that precede the conversation")
    _add_common(parser)


def run_chat(args: argparse.Namespace) -> int:
    """Talk: one answer for an argument or piped input, a conversation on a terminal."""
    opening: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    prompt = " ".join(args.prompt) or ("" if sys.stdin.isatty() else sys.stdin.read().strip())
    if not prompt and not sys.stdin.isatty():
        raise ConfigError("Nothing to say: give a prompt, or pipe one in.")
    with _open_pipeline(args) as pipeline:
        if prompt:
            _answer(pipeline, [*opening, {"role": "user", "content": prompt}], args)
        else:
            _converse(pipeline, opening, args)
    return 0


def _answer(pipeline: ChatPipeline, messages: list[Message], args: argparse.Namespace) -> str:
    """Print the answer as it comes; Ctrl-C ends the answer, not the conversation."""
    pieces: list[str] = []
    try:
        for piece in pipeline.stream(messages, **_call_options(args)):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if args.prompt:
            raise
    print()
    return "".join(pieces)


def _converse(pipeline: ChatPipeline, opening: list[Message], args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    console.print(_HELP)
    messages = list(opening)
    for line in _lines(console):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            console.print("[dim]Forgotten.[/]")
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(pipeline, messages, args)
        except RequestError as error:
            console.print(f"[red]{error.message}[/] /reset starts over.")
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _lines(console: Console) -> Iterator[str]:
    while True:
        try:
            line = console.input("[bold cyan]you[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line:
            yield line


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych generate`."""
    parser.add_argument("prompt", nargs="*", help="prompts, each answered on its own")
    parser.add_argument(
        "-i",
        "--input",
        help='JSONL file, "-" for stdin: one {"prompt": ...} or {"messages": [...]} per line;'
        " further fields are call options (max_tokens, temperature, ...)",
    )
    parser.add_argument("-o", "--output", help="JSONL file to write; default stdout")
    parser.add_argument("--batch", type=int, default=64, help="lines in flight at once")
    _add_common(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Answer a batch of prompts, in order, with progress. A bad line becomes an error line."""
    entries = _read_entries(args)
    started_s = time.monotonic()
    num_tokens = num_failed = 0
    with _open_pipeline(args) as pipeline, _open_output(args.output) as out, _bar() as bar:
        task = bar.add_task("generating", total=len(entries))
        answers = pipeline.map(entries, num_in_flight=args.batch, **_call_options(args))
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, RequestError):
                num_failed += 1
                result: dict[str, Any] = {"error": {"code": answer.code, "message": str(answer)}}
            else:
                num_tokens += answer.usage.num_output_tokens
                result = {
                    "text": answer.text,
                    "finish_reason": answer.finish_reason,
                    "prompt_tokens": answer.usage.num_prompt_tokens,
                    "completion_tokens": answer.usage.num_output_tokens,
                }
            out.write(json.dumps({**entry, **result}, ensure_ascii=False) + "\n")
            bar.advance(task)
    elapsed_s = time.monotonic() - started_s
    Console(stderr=True).print(
        f"{len(entries)} prompts, {num_failed} failed, {num_tokens} tokens in {elapsed_s:.1f} s"
        f" ({num_tokens / elapsed_s:.0f} tok/s)"
    )
    return 1 if num_failed else 0


def _read_entries(args: argparse.Namespace) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"prompt": prompt} for prompt in args.prompt]
    if args.input:
        text = sys.stdin.read() if args.input == "-" else Path(args.input).read_text("utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                entries.append(_read_entry(line, number))
    if not entries:
        raise ConfigError("No prompts: give some as arguments, or a JSONL file with --input.")
    return entries


def _read_entry(line: str, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"Line {number} of the input is not valid JSON.") from error
    if not isinstance(entry, dict) or not ({"prompt", "messages"} & set(entry)):
        raise ConfigError(f'Line {number} of the input has neither "prompt" nor "messages".')
    return entry


def _open_output(path: str | None) -> IO[str]:
    if path is None:
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    return open(path, "w", encoding="utf-8")


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )

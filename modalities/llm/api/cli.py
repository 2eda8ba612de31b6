"""`triptych chat` and `triptych run`: a chat model at a terminal.

Owns the arguments and the single answer; `chat_session` has the conversation. Where the model runs
is the concern of `open_chat`, which callers pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from triptych.core.client.choice import add_server_options
from triptych.core.errors import ConfigError
from triptych.core.options.adapters import AdapterOptions
from triptych.core.options.declaration import Role
from triptych.core.options.table import add_options
from triptych.core.process.cli_io import show
from triptych.modalities.llm.api.chat_session import ChatSession, OpenChat, user_message
from triptych.modalities.llm.api.operands import split_operands


def add_common(
    parser: argparse.ArgumentParser, *roles: Role, exclude: Collection[str] = ()
) -> None:
    """Declare the common options of commands that answer, for models of `roles`."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, help="max tokens of an answer")
    sampling.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    sampling.add_argument("--top-p", type=float, help="nucleus sampling")
    sampling.add_argument("--request-seed", type=int, metavar="SEED", help="repeat a past answer")
    sampling.add_argument("--stop", action="append", default=[], help="stop text; repeat")
    sections = ["models", "device", "cache", "schedule", "speculation", "vision"]
    if set(AdapterOptions.ROLES).intersection(roles):
        sections.append("adapters")
        sampling.add_argument(
            "--adapter", metavar="NAME", help="LoRA adapter of --lora-paths, or of the server"
        )
    form = parser.add_argument_group("response format").add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON object")
    form.add_argument("--json-schema", metavar="FILE", help="JSON that a schema describes")
    form.add_argument("--regex", metavar="PATTERN", help="text that a regular expression matches")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of these; repeat")
    form.add_argument("--grammar", metavar="FILE", help="text of a grammar, Lark's or GBNF")
    add_server_options(parser)
    add_options(parser, sections=sections, roles=roles, exclude=exclude)


def call_options(args: argparse.Namespace) -> dict[str, Any]:
    """The call options in the arguments."""
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.request_seed,
        "adapter": getattr(args, "adapter", None),
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


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych chat`."""
    parser.add_argument(
        "operands",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="answer this prompt (or piped input) and exit; without one, converse. The first word"
        " is the model if it is the name of one (`triptych list`), a hub id, a GGUF file or a"
        " folder, and --model is not given; otherwise all words are the prompt",
    )
    _add_conversation(parser)
    add_common(parser, "chat", "vision")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `triptych run`, whose first argument is always the model."""
    parser.add_argument("model", nargs=1, metavar="MODEL", help="as --model; fetched if missing")
    parser.add_argument("operands", nargs="*", metavar="PROMPT", help="answer this prompt and exit")
    _add_conversation(parser)
    add_common(parser, "chat", "vision", exclude=("model",))


def _add_conversation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image to send first; repeat"
    )


def run_chat(args: argparse.Namespace, open_chat: OpenChat) -> int:
    """Answer an argument or piped input once, or hold a conversation on a terminal.

    Images are taken if the model that `open_chat` opens takes them.
    """
    model, words = split_operands(args)
    if model:
        args = argparse.Namespace(**{**vars(args), "model": [model]})
    is_terminal = sys.stdin.isatty()
    prompt = " ".join(words) or ("" if is_terminal else sys.stdin.read().strip())
    options = call_options(args)
    if prompt:
        opening = [{"role": "system", "content": args.system}] if args.system else []
        with open_chat(args) as chat:
            for piece in chat.stream([*opening, user_message(prompt, args.image)], **options):
                show(piece)
            show("\n")
    elif is_terminal:
        ChatSession(open_chat, args, options).run()
    else:
        raise ConfigError("No prompt: give one as an argument, or pipe one in.")
    return 0

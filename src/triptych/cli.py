"""The `triptych` command: which subcommands there are, and how they fail.

Owns the registry, the top-level help and the exit codes. Knows nothing of what a command does: its
module is imported only when it runs, so `triptych --help` answers at once and loads no torch.

A command's module exposes two functions, by default `add_arguments(parser)`, which declares its
flags (those of the configuration with `core.options.add_options`), and `run(args) -> int`, which
does the work and returns the exit code. A module with several commands puts the name in between:
`add_chat_arguments`, `run_chat`.

Exit codes: 0 done; 1 failed while running, or nobody reads on; 2 wrong use or set-up (one line says
what to do); 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from triptych.core.errors import ConfigError, RequestError, SetupError, TriptychError


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: where its code is and how it is used."""

    name: str
    summary: str
    module: str
    examples: tuple[str, ...]
    operands: str = ""
    is_named: bool = False

    def _function(self, pattern: str) -> Any:
        name = pattern.format(f"_{self.name}" if self.is_named else "")
        return getattr(importlib.import_module(self.module), name)

    def parser(self) -> argparse.ArgumentParser:
        """The command's parser, with every flag it takes."""
        parser = _Parser(
            prog=f"triptych {self.name}",
            usage=f"triptych {self.name} [OPTIONS] {self.operands}".rstrip(),
            description=self.summary,
            epilog="examples:\n" + "".join(f"  {line}\n" for line in self.examples),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self._function("add{}_arguments")(parser)
        return parser

    def run(self, argv: Sequence[str]) -> int:
        """Parse `argv` and do the work; raises ConfigError where `argv` is wrong."""
        from triptych.core.options import parse

        args = parse(self.parser(), argv)
        return int(self._function("run{}")(args))


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaints in the one exception tree."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


class _Help(argparse.RawDescriptionHelpFormatter):
    """argparse's help, naming the value once for all spellings of a flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


_LLM = "triptych.modalities.llm"
_VLM = "triptych.modalities.vlm"
_TTS = "triptych.modalities.tts"
_IMAGES = "triptych.modalities.diffusion"
COMMANDS: tuple[Command, ...] = (
    Command(
        "serve",
        "Serve models over HTTP, as OpenAI does.",
        "triptych.serve",
        (
            "triptych serve",
            "triptych serve --model HuggingFaceTB/SmolLM2-360M-Instruct --port 8080",
            "triptych serve --model chat=./model.gguf --api-key-file keys.txt",
            "triptych serve --config-file triptych.yaml",
        ),
    ),
    Command(
        "chat",
        "Talk to a model in the terminal, about pictures too where it sees.",
        f"{_VLM}.cli",
        (
            "triptych chat",
            'triptych chat "Why is the sky blue?" --max-tokens 100',
            'triptych chat --image apple.png "What colour is it?"',
            "git diff | triptych chat --system 'Write a commit message for this diff.'",
        ),
        operands="[PROMPT]",
        is_named=True,
    ),
    Command(
        "see",
        "Ask about pictures.",
        f"{_VLM}.cli",
        (
            'triptych see apple.png "What is this?"',
            'triptych imagine "two green frogs" -o - | triptych see - "How many frogs are there?"',
            "triptych see before.jpg after.jpg 'What has changed?'"
            " --model HuggingFaceTB/SmolVLM-256M-Instruct",
        ),
        operands="PICTURE ... [QUESTION]",
        is_named=True,
    ),
    Command(
        "generate",
        "Answer a batch of prompts, from arguments or JSONL to JSONL.",
        f"{_LLM}.cli",
        (
            'triptych generate "One." "Two." --temperature 0',
            "triptych generate --input prompts.jsonl --output answers.jsonl",
        ),
        operands="[PROMPT ...]",
        is_named=True,
    ),
    Command(
        "embed",
        "Turn texts into vectors, or put them in order of likeness.",
        f"{_LLM}.embedding.cli",
        (
            'triptych embed "a kitten" "a cat" -o vectors.npy',
            "triptych embed --similar-to 'a pet' < nouns.txt",
        ),
        operands="[TEXT ...]",
        is_named=True,
    ),
    Command(
        "speak",
        "Speak a text, to a file or as it is made.",
        f"{_TTS}.cli",
        (
            'triptych speak "Good morning." -o morning.wav',
            "triptych speak --voice af_bella --speed 1.2 -o chapter.mp3 < chapter.txt",
            'triptych speak "It is played while it is made." --format wav | aplay',
        ),
        operands="[TEXT]",
        is_named=True,
    ),
    Command(
        "transcribe",
        "Write down what is said in recordings.",
        f"{_TTS}.recognition.cli",
        (
            "triptych transcribe talk.mp3",
            "triptych transcribe interview.wav --format srt -o interview.srt",
        ),
        operands="FILE ...",
        is_named=True,
    ),
    Command(
        "voices",
        "List, add and delete voices.",
        f"{_TTS}.voices.cli",
        (
            "triptych voices",
            'triptych voices add "My voice" --audio me.wav --consent "I agree." --model csm',
        ),
        operands="[list|add|delete] [VOICE ...]",
        is_named=True,
    ),
    Command(
        "imagine",
        "Draw pictures from a text, or from other pictures.",
        f"{_IMAGES}.cli",
        (
            'triptych imagine "a red apple" -o apple.png',
            'triptych imagine "a penguin next to a house" -n 4 --steps 28 -o penguin.webp',
            'triptych imagine "a green car" -i car.png --strength 0.6 -o green.png',
            "triptych imagine --batch prompts.jsonl -o pictures",
        ),
        operands="[PROMPT]",
        is_named=True,
    ),
    Command(
        "calibrate",
        "Measure an image model, so that it may skip steps.",
        f"{_IMAGES}.calibrate_cli",
        (
            "triptych calibrate --steps 50 28 20",
            "triptych calibrate black-forest-labs/FLUX.1-dev --steps 28 --prompts prompts.txt",
        ),
        operands="[MODEL]",
        is_named=True,
    ),
    Command(
        "bench",
        "Measure any OpenAI-compatible server, or two side by side.",
        f"{_LLM}.bench.cli",
        (
            "triptych bench --concurrency 8 --prompt-tokens 256 --output-tokens 64",
            "triptych bench --rate 4 --num-requests 200 --shared-prefix-tokens 1500",
            "triptych bench --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --repeats 5",
        ),
    ),
    Command(
        "models",
        "List, fetch, verify and remove models.",
        "triptych.models_cli",
        ("triptych models list", "triptych models fetch HuggingFaceTB/SmolLM2-360M-Instruct"),
        operands="list|fetch|verify|remove [MODEL ...]",
    ),
    Command(
        "config",
        "Print the resolved configuration and where each value came from.",
        "triptych.config_cli",
        ("triptych config --config-file triptych.yaml", "triptych config --changed --format yaml"),
    ),
    Command("version", "Print versions.", "triptych.version_cli", ("triptych version",)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Only `--help` exits by itself."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left. Keep the interpreter from flushing into the void.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TriptychError as error:
        if _wants_debug(argv):
            traceback.print_exception(error)
        _print_error(error)
        return 2 if isinstance(error, SetupError | RequestError) else 1


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    name = "version" if argv[0] in ("-V", "--version") else argv[0]
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        raise ConfigError(_explain_command(name))
    return command.run(argv[1:])


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    commands = "".join(f"  {command.name:{width}}  {command.summary}\n" for command in COMMANDS)
    examples = "".join(f"  {command.examples[0]}\n" for command in COMMANDS[:4])
    return (
        "usage: triptych COMMAND [OPTIONS]\n\n"
        "One server for text, vision, speech and images.\n\n"
        f"commands:\n{commands}\nexamples:\n{examples}\n"
        "`triptych COMMAND --help` lists a command's options.\n"
    )


def _explain_command(name: str) -> str:
    from triptych.core.options import nearest

    kind = "option" if name.startswith("-") else "command"
    near = nearest(name, [command.name for command in COMMANDS])
    hint = f"did you mean `triptych {near}`?" if near else "`triptych --help` lists the commands."
    return f"there is no {kind} {name!r}; {hint}"


def _wants_debug(argv: Sequence[str]) -> bool:
    """Whether `--log-level debug` was asked for, even where the arguments do not parse."""
    wanted = "--log-level debug" in " ".join(argv).replace("=", " ")
    return wanted or os.environ.get("TRIPTYCH_LOG_LEVEL") == "debug"


def _print_error(error: TriptychError) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), " ".join(error.message.split()))
    Console(stderr=True, soft_wrap=True).print(line)

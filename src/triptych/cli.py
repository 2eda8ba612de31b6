"""The `triptych` command: its subcommands and exit codes.

Owns the top-level help and the exit codes. Knows nothing of a command's work (see
`core.options.command`): its module is imported only when it runs, so `triptych --help` answers at
once and loads no torch.

Exit codes: 0 done; 1 failed while running, or the output was closed; 2 wrong usage or setup (one
line says what to do); 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from triptych.core.errors import ConfigError, RequestError, SetupError, TriptychError
from triptych.core.options.command import Command
from triptych.modalities.registry import MODALITIES

_OWN = (
    Command(
        "serve",
        "Serve models over an OpenAI-compatible HTTP API.",
        "triptych.serve",
        (
            "triptych serve",
            "triptych serve HuggingFaceTB/SmolLM2-360M-Instruct --port 8080",
            "triptych serve qwen2.5-coder-0.5b whisper-tiny.en kokoro-82m",
            "triptych serve chat=./model.gguf --api-key-file keys.txt",
            "triptych serve --config-file triptych.yaml",
            "triptych serve --bundle ./bundle",
        ),
        operands="[MODEL ...]",
    ),
    Command(
        "talk",
        "Talk to a model: with microphone and loudspeaker, or with files.",
        "triptych.talk_cli",
        (
            "triptych talk",
            "triptych talk question.wav --output answer.wav",
            'triptych talk --text "What is the capital of France?" --output answer.mp3',
            "triptych talk question.wav -o answer.wav --server http://gpu-box:8000",
        ),
        operands="[FILE ...]",
    ),
    Command(
        "models",
        "List, fetch, verify and remove models.",
        "triptych.models_cli",
        ("triptych models list", "triptych models fetch HuggingFaceTB/SmolLM2-360M-Instruct"),
        operands="list|fetch|verify|remove [MODEL ...]",
    ),
    Command(
        "list",
        "List the models on this machine, and further ones to fetch.",
        "triptych.model_commands",
        ("triptych list",),
        operands="[MODEL ...]",
        is_named=True,
    ),
    Command(
        "pull",
        "Fetch models to this machine.",
        "triptych.model_commands",
        ("triptych pull kokoro-82m", "triptych pull HuggingFaceTB/SmolLM2-360M-Instruct"),
        operands="[MODEL ...]",
        is_named=True,
    ),
    Command(
        "warm-cache",
        "Fetch, convert and compile ahead of time, into a bundle that makes starts fast.",
        "triptych.warm_cache_cli",
        (
            "triptych warm-cache",
            "triptych warm-cache HuggingFaceTB/SmolLM2-360M-Instruct",
            "triptych warm-cache chat=./model.gguf --bundle ./bundle",
            "triptych warm-cache --target cuda:sm_90 --target hip:gfx942 --bundle ./bundle",
        ),
        operands="[MODEL ...]",
    ),
    Command(
        "ps",
        "List the models that a server has in memory.",
        "triptych.server_cli",
        ("triptych ps", "triptych ps --server http://gpu-box:8000"),
        is_named=True,
    ),
    Command(
        "stop",
        "Unload a model of a server, or stop a server, after the requests that run.",
        "triptych.server_cli",
        ("triptych stop qwen2.5-coder-0.5b", "triptych stop"),
        operands="[MODEL]",
        is_named=True,
    ),
    Command(
        "explain",
        "Explain where the seconds of a request to a server went.",
        "triptych.server_cli",
        ("triptych explain req-4f6c2e7c51c24f0c8a5b7d5e9c1f0a3e",),
        operands="ID",
        is_named=True,
    ),
    Command(
        "config",
        "Print the resolved configuration and the source of each value.",
        "triptych.config_cli",
        ("triptych config --config-file triptych.yaml", "triptych config --changed --format yaml"),
        operands="[MODEL ...]",
    ),
    Command(
        "version", "Print the installed versions.", "triptych.version_cli", ("triptych version",)
    ),
)
_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "serve": ("serve",),
        "use": (
            *("run", "chat", "talk", "see", "generate", "embed"),
            *("speak", "voices", "transcribe", "imagine"),
        ),
        "models": ("list", "pull", "models", "warm-cache"),
        "operate": ("ps", "stop", "explain", "config", "version"),
        "develop": ("bench", "calibrate"),
    }
)
"""The commands by purpose, in the order of help; further ones follow."""
_EXAMPLES = (
    ("Serve the embedded models at http://127.0.0.1:8000", "triptych serve"),
    ("Talk to a model, with a server or without", "triptych run qwen2.5-coder-0.5b"),
    ("Generate an image", 'triptych imagine "a red apple" -o apple.png'),
    ("See what the server has loaded", "triptych ps"),
)


def all_commands() -> tuple[Command, ...]:
    """Return the commands of all modalities and of the server, in the order of help."""
    commands = [*(command for each in MODALITIES for command in each.commands), *_OWN]
    names = [name for group in _GROUPS.values() for name in group]
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(commands, key=lambda command: places.get(command.name, len(places))))


COMMANDS = all_commands()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Only `--help` raises `SystemExit`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Keep the interpreter from flushing to it at exit.
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
    groups = dict(_GROUPS)
    grouped = {name for names in groups.values() for name in names}
    groups["more"] = tuple(each.name for each in COMMANDS if each.name not in grouped)
    lines = []
    for title, names in groups.items():
        listed = [command for command in COMMANDS if command.name in names]
        lines += [f"\n{title}:"] if listed else []
        lines += [f"  {command.name:{width}}  {command.summary}" for command in listed]
    examples = "".join(f"  {line}\n      {command}\n" for line, command in _EXAMPLES)
    return (
        "usage: triptych COMMAND [OPTIONS]\n\n"
        "One server for text, vision, speech and images.\n"
        + "\n".join(lines)
        + f"\n\nexamples:\n{examples}\n"
        "`triptych COMMAND --help` lists a command's options.\n"
        "Commands use a server of yours that runs on this machine; --no-server forbids it.\n"
    )


def _explain_command(name: str) -> str:
    from triptych.core.process.suggestions import nearest

    kind = "option" if name.startswith("-") else "command"
    near = nearest(name, [command.name for command in COMMANDS])
    hint = f"did you mean `triptych {near}`?" if near else "`triptych --help` lists the commands."
    return f"unknown {kind} {name!r}; {hint}"


def _wants_debug(argv: Sequence[str]) -> bool:
    """Whether `--log-level debug` was given, even if the arguments do not parse."""
    wanted = "--log-level debug" in " ".join(argv).replace("=", " ")
    return wanted or os.environ.get("TRIPTYCH_LOG_LEVEL") == "debug"


def _print_error(error: TriptychError) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), " ".join(error.message.split()))
    Console(stderr=True, soft_wrap=True).print(line)

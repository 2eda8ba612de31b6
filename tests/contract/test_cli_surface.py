"""The command line is frozen: a change of commands or flags shows up as a change of a file.

Where the change is meant, run `python tests/contract/test_cli_surface.py` and commit the file.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from triptych.cli import COMMANDS

SNAPSHOT = Path(__file__).with_name("cli_surface.txt")


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"  {name}"
                yield from (f"  {line}" for line in _lines(inner))
        elif action.help != argparse.SUPPRESS:
            choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
            yield "  " + (" ".join(action.option_strings) or action.dest) + choices


def surface() -> str:
    """Every command with its visible flags."""
    blocks = ("\n".join([command.name, *_lines(command.parser())]) for command in COMMANDS)
    return "\n\n".join(blocks) + "\n"


def test_command_line_is_as_recorded() -> None:
    assert surface() == SNAPSHOT.read_text(encoding="utf-8")


def test_every_command_has_examples_and_a_summary() -> None:
    for command in COMMANDS:
        assert command.summary.endswith(".")
        assert all(line for line in command.examples)
        assert command.examples[0] in command.parser().format_help()


if __name__ == "__main__":
    SNAPSHOT.write_text(surface(), encoding="utf-8")

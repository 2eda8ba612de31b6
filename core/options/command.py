"""A subcommand of `triptych`, as data.

Owns what a command is and how its parser is made. Knows nothing of what a command does: its module
is imported only when it runs.

A command's module exposes two functions, by default `add_arguments(parser)`, which declares its
flags (those of the configuration with `core.options.table.add_options`), and `run(args) -> int`,
which does the work and returns the exit code. A module with several commands puts the name in
between: `add_chat_arguments`, `run_chat`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from triptych.core.errors import ConfigError
from triptych.core.process.lazy import load


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
        return load(f"{self.module}:{name}")

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
        from triptych.core.options.table import parse

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

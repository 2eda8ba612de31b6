"""A subcommand of `triptych`, as data.

Owns the declaration and the parser of a command. Knows nothing of a command's work: its module is
imported only when the command runs.

A command's module exposes two functions, by default `add_arguments(parser)`, which declares its
flags (those of the configuration with `core.options.table.add_options`), and `run(args) -> int`,
which does the work and returns the exit code. A module with several commands adds the command's
name: `add_chat_arguments`, `run_chat`.
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
    """One subcommand: its summary, module and examples."""

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
        """Build the command's parser with all its flags."""
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
        """Parse `argv` and run the command; raises ConfigError for invalid arguments."""
        from triptych.core.options.table import parse

        args = parse(self.parser(), argv)
        return int(self._function("run{}")(args))


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that names the value once after all spellings of a flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

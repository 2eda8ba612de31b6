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
import sys
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


class SectionGroup(argparse._ArgumentGroup):
    """The options of a section, without the common ones. Short help leaves them out."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError`, with a short help and a full one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_argument("--help-all", action=_FullHelp, nargs=0, help="show all options")

    def format_help(self) -> str:
        """Format the help without rare options, and name the flag that lists all."""
        whole, epilog, form = self._action_groups, self.epilog or "", self.formatter_class
        self.formatter_class = _ShortHelp
        self._action_groups = [each for each in whole if not isinstance(each, SectionGroup)]
        rare = [each for each in whole if isinstance(each, SectionGroup)]
        num_rare = sum(len(group._group_actions) for group in rare)
        if num_rare:
            self.epilog = f"{epilog}\n`{self.prog} --help-all` lists {num_rare} more options.\n"
        try:
            return super().format_help()
        finally:
            self._action_groups, self.epilog, self.formatter_class = whole, epilog, form

    def format_full_help(self) -> str:
        """Format the help with all options."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


class _FullHelp(argparse.Action):
    """Prints the full help and ends the command."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        kwargs |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(option_strings, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, _Parser)
        sys.stdout.write(parser.format_full_help())
        parser.exit()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that names the value once after all spellings of a flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class _ShortHelp(_Help):
    """Help without other servers' spellings of a flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = action.option_strings
        short = [each for each in spellings[1:] if len(each) == 2]
        action.option_strings = [*spellings[:1], *short]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings

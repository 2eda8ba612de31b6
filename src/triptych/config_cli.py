"""`triptych config`: print the resolved configuration. Secrets are masked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import yaml

from triptych.core.options.declaration import Option
from triptych.core.options.table import (
    add_model_operands,
    add_options,
    describe,
    resolve_with_sources,
)
from triptych.core.options.values import format_value

_Row = tuple[Option, Any, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags and every option."""
    parser.add_argument(
        "--format",
        choices=("table", "yaml", "json"),
        default="table",
        help="table (default) also shows the source of each value",
    )
    parser.add_argument("--changed", action="store_true", help="only values that are not default")
    add_model_operands(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the options of `triptych serve` for the same flags."""
    rows = describe(resolve_with_sources(args))
    if args.changed:
        rows = [row for row in rows if row[2] != "default"]
    if args.format == "table":
        _print_table(rows)
    else:
        sys.stdout.write(_dump(rows, args.format))
    return 0


def _dump(rows: Sequence[_Row], form: str) -> str:
    """Format the rows as a file for `--config-file`, except for masked secrets."""
    sections: dict[str, dict[str, Any]] = {}
    for option, value, _ in rows:
        plain = list(value) if isinstance(value, tuple) else value
        sections.setdefault(option.section, {})[option.name] = plain
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(sections), indent=2).decode() + "\n"
    return yaml.safe_dump(sections, sort_keys=False)


def _print_table(rows: Sequence[_Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("option", "value", "source", box=None, pad_edge=False)
    for option, value, source in rows:
        style = "dim" if source == "default" else ""
        cells = (option.name, format_value(value) or "-", source)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    Console().print(table)

"""`triptych version`: what is installed."""

from __future__ import annotations

import argparse

from triptych.core.process.versions import versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`version` takes no option."""


def run(args: argparse.Namespace) -> int:
    """Print one line per component."""
    for name, version in versions().items():
        print(f"{name} {version}")
    return 0

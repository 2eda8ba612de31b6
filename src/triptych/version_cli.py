"""`triptych version`: prints the installed versions."""

from __future__ import annotations

import argparse

from triptych.core.process.versions import versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options: `version` takes none."""


def run(args: argparse.Namespace) -> int:
    """Print one line per component."""
    for name, version in versions().items():
        print(f"{name} {version}")
    return 0

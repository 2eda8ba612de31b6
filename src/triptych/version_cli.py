"""`triptych version`: what is installed, without importing it."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

from triptych import __version__

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn")


def versions() -> dict[str, str]:
    """Versions of Triptych, Python and the libraries that decide what it does."""
    found = {"triptych": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`version` takes no option."""


def run(args: argparse.Namespace) -> int:
    """Print one line per component."""
    for name, version in versions().items():
        print(f"{name} {version}")
    return 0

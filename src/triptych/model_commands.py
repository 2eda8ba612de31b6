"""`triptych list` and `triptych pull`: the habits of Ollama's users.

Owns the names; `triptych.models_cli` does the work of `triptych models list` and `fetch`.
"""

from __future__ import annotations

import argparse

from triptych import models_cli


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `triptych list`."""
    models_cli.add_model_arguments(parser)


def run_list(args: argparse.Namespace) -> int:
    """List the models on this machine."""
    return models_cli.run(argparse.Namespace(**vars(args), action="list"))


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `triptych pull`."""
    models_cli.add_model_arguments(parser)


def run_pull(args: argparse.Namespace) -> int:
    """Fetch models; without a name, the default ones."""
    return models_cli.run(argparse.Namespace(**vars(args), action="fetch"))

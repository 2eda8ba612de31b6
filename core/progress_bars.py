"""The bar of a command that works through a number of things.

Owns how it looks. Knows not what is counted.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def count_bar(*, is_hidden: bool = False, is_transient: bool = False) -> Progress:
    """How many are done of how many, on stderr, and how long the rest may take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=is_hidden,
        transient=is_transient,
    )

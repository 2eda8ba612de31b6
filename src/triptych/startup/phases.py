"""The phases of a command that prepares a start, one line each, and the hits of their lookups.

Owns the format: colored on a terminal, plain elsewhere, log records if logs are JSON. Knows nothing
of the work in a phase.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from triptych import __version__
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields
from triptych.core.process.lookups import Lookup

_log = logging.getLogger("triptych.start")


class PhaseLines:
    """Prints phases as they end."""

    def __init__(self, options: ServerOptions) -> None:
        self._is_json = options.log_format == "json"
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        if not self._is_json:
            self._console.print(Text.assemble(("triptych ", "bold"), __version__))

    def phase(self, name: str, elapsed_s: float, note: str = "") -> None:
        """Print a finished phase."""
        if self._is_json:
            log_phase(logging.INFO, name, elapsed_s, note)
            return
        mark = ("\u2713 ", "green") if self._console.is_terminal else "  "
        seconds = f"{elapsed_s:7.2f} s"
        self._console.print(
            Text.assemble(mark, f"{name:<14}", (seconds, "cyan"), "  ", (note, "dim"))
        )


def log_phase(level: int, name: str, elapsed_s: float, note: str) -> None:
    """Log a finished phase."""
    _log.log(level, "phase", extra=fields(phase=name, elapsed_s=round(elapsed_s, 3), note=note))


def summarize(lookups: Iterable[Lookup], phase: str) -> str:
    """Describe the hits and misses of a phase, each miss with its reason."""
    found = [lookup for lookup in lookups if lookup.phase == phase]
    misses = [lookup for lookup in found if not lookup.is_hit]
    counts = f"hits {len(found) - len(misses)}, misses {len(misses)}"
    reasons = (f"{miss.what}: {miss.reason}" for miss in misses)
    return "; ".join((counts, *reasons))

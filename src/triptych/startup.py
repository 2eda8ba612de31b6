"""Output of a starting server: one line per phase, with seconds and cache hits.

Owns the format: colored on a terminal, plain elsewhere, log records if logs are JSON. Knows nothing
of the work in a phase.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from triptych import __version__
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields
from triptych.core.process.lookups import Lookup
from triptych.core.weights.progress import Progress, RichProgress, SilentProgress

_log = logging.getLogger(__name__)


class Startup:
    """Prints phases as they end."""

    def __init__(self, options: ServerOptions) -> None:
        self._is_json = options.log_format == "json"
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started_s = time.monotonic()
        self._lookups: list[Lookup] = []
        if not self._is_json:
            self._console.print(Text.assemble(("triptych ", "bold"), __version__))

    def progress(self) -> Progress:
        """Return the progress bar of downloads and conversions, silent without a terminal."""
        return RichProgress() if sys.stderr.isatty() and not self._is_json else SilentProgress()

    def phase(self, name: str, elapsed_s: float, note: str = "") -> None:
        """Print a finished phase."""
        if self._is_json:
            _log.info("phase", extra=fields(phase=name, elapsed_s=round(elapsed_s, 3), note=note))
            return
        mark = ("\u2713 ", "green") if self._console.is_terminal else "  "
        seconds = f"{elapsed_s:7.2f} s"
        self._console.print(
            Text.assemble(mark, f"{name:<14}", (seconds, "cyan"), "  ", (note, "dim"))
        )

    def take(self, lookup: Lookup) -> None:
        """Record a cache hit or miss."""
        self._lookups.append(lookup)

    def restart(self) -> None:
        """Restart the clock, since a child has to start again."""
        self._started_s = time.monotonic()

    def ready(self, note: str) -> None:
        """Print readiness with the seconds since the start."""
        seconds: dict[str, float] = {}
        for lookup in self._lookups:
            seconds[lookup.phase] = seconds.get(lookup.phase, 0.0) + lookup.seconds
        for phase, elapsed_s in seconds.items():
            self.phase(phase, elapsed_s, summarize(self._lookups, phase))
        self._lookups.clear()
        self.phase("ready", time.monotonic() - self._started_s, note)


def summarize(lookups: Iterable[Lookup], phase: str) -> str:
    """Describe the hits and misses of a phase, each miss with its reason."""
    found = [lookup for lookup in lookups if lookup.phase == phase]
    misses = [lookup for lookup in found if not lookup.is_hit]
    counts = f"hits {len(found) - len(misses)}, misses {len(misses)}"
    reasons = (f"{miss.what}: {miss.reason}" for miss in misses)
    return "; ".join((counts, *reasons))

"""The output of a starting server: what a start reports, and the view that shows it.

Owns the choice of the view: a table on a terminal, log lines elsewhere and with JSON logs. Knows
nothing of the work of a start.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Self

from rich.console import Console

from triptych.core.engine_api.reports import ModelStatus
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields
from triptych.core.process.lookups import Lookup
from triptych.core.weights.progress import Progress
from triptych.startup.phases import log_phase, summarize
from triptych.startup.state import StartProgress, StartState
from triptych.startup.table import Address
from triptych.startup.views import LogView, TableView, View

_log = logging.getLogger("triptych.start")


def has_table(options: ServerOptions) -> bool:
    """Whether a start shows a table: on a terminal that can move its cursor, with text logs."""
    console = Console(stderr=True)
    return options.log_format == "text" and sys.stderr.isatty() and not console.is_dumb_terminal


class Startup:
    """Shows a start inside its `with` block."""

    def __init__(
        self,
        options: ServerOptions,
        view: View | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # JSON is for programs, which filter; a person sees phases only with --log-level debug.
        self._phase_level = logging.INFO if options.log_format == "json" else logging.DEBUG
        self._view: View = view or (
            TableView(Console(stderr=True)) if has_table(options) else LogView()
        )
        self._clock = clock
        self._started_s = clock()
        self._lookups: list[Lookup] = []
        self.state = StartState(self._view.on_event, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()

    def expect(self, models: Iterable[tuple[str, str]]) -> None:
        """Begin to show the models, by name and kind (maybe empty)."""
        self._view.close()
        self.state.expect(models)
        self._view.open(self.state)

    def progress(self) -> Progress:
        """Return the receiver of the progress of downloads and conversions."""
        return StartProgress(self.state)

    def phase(self, name: str, elapsed_s: float, note: str = "") -> None:
        """Log a finished phase."""
        log_phase(self._phase_level, name, elapsed_s, note)

    def take(self, lookup: Lookup) -> None:
        """Record a cache hit or miss."""
        self._lookups.append(lookup)

    def on_model(self, status: ModelStatus, memory_bytes: int) -> None:
        """Record the state of a model in the engine."""
        self.state.take(status, memory_bytes)

    def restart(self) -> None:
        """Restart the clock, since a child has to start again."""
        self._started_s = self._clock()

    def ready(self, address: Address) -> None:
        """Show that the server is ready; after a child's restart, only log it."""
        for phase, lookups in _by_phase(self._lookups).items():
            seconds = sum(lookup.seconds for lookup in lookups)
            self.phase(phase, seconds, summarize(lookups, phase))
        self._lookups.clear()
        elapsed_s = self._clock() - self._started_s
        if not self.state.is_open:
            _log.info("ready again", extra=fields(elapsed_s=round(elapsed_s, 3)))
            return
        self.state.is_open = False
        self._view.ready(self.state, address, elapsed_s)


def _by_phase(lookups: Iterable[Lookup]) -> dict[str, list[Lookup]]:
    found: dict[str, list[Lookup]] = {}
    for lookup in lookups:
        found.setdefault(lookup.phase, []).append(lookup)
    return found

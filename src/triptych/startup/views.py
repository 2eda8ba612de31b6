"""The two outputs of a start: a table that changes on a terminal, and log lines.

Owns when something is written. `triptych.startup.table` owns the layout of the table; a log line of
the start has the fields of its event, so that JSON logs have them as values.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from triptych.core.process.logs import fields
from triptych.startup.state import Event, ModelRow, StartState
from triptych.startup.table import Address, draw, last_lines, reason

_REFRESHES_PER_S = 8
_MB = 1e6
_MIB = 2**20
_log = logging.getLogger("triptych.start")


class View(Protocol):
    """Shows a start."""

    def open(self, state: StartState) -> None:
        """Begin to show `state`."""

    def on_event(self, event: Event, row: ModelRow) -> None:
        """Show an event, at once or not at all."""

    def ready(self, state: StartState, address: Address, elapsed_s: float) -> None:
        """Show that the server is ready."""

    def close(self) -> None:
        """Show nothing more."""


class TableView:
    """A table on a terminal, redrawn several times per second until the server is ready."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._state: StartState | None = None

    def open(self, state: StartState) -> None:
        """Draw the table; log lines of this process appear above it from now on."""
        self._state = state
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
        self._live.start()

    def on_event(self, event: Event, row: ModelRow) -> None:
        """Do nothing: the table is drawn from its state."""

    def ready(self, state: StartState, address: Address, elapsed_s: float) -> None:
        """Leave the final table, and print the last lines below it."""
        self.close()
        for line in last_lines(state, address, elapsed_s):
            self._console.print(line, highlight=False)

    def close(self) -> None:
        """Stop drawing; the table remains as it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self._console.print(self._draw())

    def _draw(self) -> RenderableType:
        assert self._state is not None
        return draw(self._state, self._console.width)


class LogView:
    """A log line for each event that matters."""

    def __init__(self) -> None:
        self._clock = time.monotonic

    def open(self, state: StartState) -> None:
        """Log the models that will be served."""
        self._clock = state.clock
        _log.info("start", extra=fields(models=", ".join(state.rows)))

    def on_event(self, event: Event, row: ModelRow) -> None:
        """Log an event of a model."""
        if event == "refused":
            _log.warning("model not loaded", extra=fields(model=row.name, reason=reason(row)))
            return
        messages = {
            "fetching": str(row.action).lower(),
            "progress": str(row.action).lower(),
            "fetched": "downloaded",
            "loading": "loading",
            "loaded": "loaded",
        }
        _log.info(
            messages[event], extra=fields(model=row.name, **_numbers(event, row, self._clock()))
        )

    def ready(self, state: StartState, address: Address, elapsed_s: float) -> None:
        """Log that the server is ready, as a warning if not every model is."""
        num_models, num_refused = len(state.rows), len(state.refused)
        named = fields(
            phase="ready",
            elapsed_s=round(elapsed_s, 3),
            num_ready=num_models - num_refused,
            num_models=num_models,
            memory_mib=round(state.memory_bytes / _MIB, 1),
            budget_mib=round(state.budget_bytes / _MIB, 1),
            device=state.device,
            url=address.url or "-",
        )
        level = logging.WARNING if num_refused else logging.INFO
        _log.log(level, "ready", extra=named)

    def close(self) -> None:
        """Do nothing: each line is complete."""


def _numbers(event: Event, row: ModelRow, now_s: float) -> dict[str, float]:
    """The fields of an event, in units that people read."""
    elapsed_s = round(now_s - row.began_s, 1)
    done_mb, size_mb = round(row.done_bytes / _MB, 1), round(row.total_bytes / _MB, 1)
    size = {"size_mb": size_mb} if row.total_bytes else {}
    numbers: dict[Event, dict[str, float]] = {
        "fetching": size,
        "progress": {
            "done_mb": done_mb,
            **size,
            "mb_per_s": round(row.bytes_per_s(now_s) / _MB, 2),
        },
        "fetched": {"size_mb": done_mb, "elapsed_s": elapsed_s},
        "loaded": {"memory_mib": round(row.memory_bytes / _MIB, 1), "elapsed_s": elapsed_s},
    }
    return numbers.get(event, {})

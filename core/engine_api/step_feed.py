"""Delivery of an engine's step reports to watchers, in process or across a socket.

Owns the set of watchers of one client. Knows nothing of what they do with a report.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.core.engine_api.reports import StepReport

StepSink = Callable[[StepReport], None]
"""Receives every report on the client's asyncio loop; must not block or raise."""


class StepFeed:
    """The watchers of one client. `switch(is_on)` runs when the first joins and the last leaves."""

    def __init__(self, switch: Callable[[bool], object]) -> None:
        self._switch = switch
        self._sinks: dict[object, StepSink] = {}

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: StepSink) -> Callable[[], None]:
        """Deliver reports to `sink` until the returned function is called."""
        watcher = object()
        self._sinks[watcher] = sink
        if len(self._sinks) == 1:
            self._switch(True)

        def leave() -> None:
            if self._sinks.pop(watcher, None) is not None and not self._sinks:
                self._switch(False)

        return leave

    def resume(self) -> None:
        """Switch reports on in a new engine, if there are watchers."""
        if self._sinks:
            self._switch(True)

    def deliver(self, report: StepReport) -> None:
        """Pass `report` to every watcher."""
        for sink in tuple(self._sinks.values()):
            sink(report)

"""The state of a start: a row for each model, from its download to its place on the device.

Owns the rows and the events that change them. Knows no output: a terminal draws the rows when it
likes, a log has a line for each event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from triptych.core.engine_api.reports import ModelStatus
from triptych.core.errors import ErrorInfo
from triptych.core.weights.progress import Action

Step = Literal["waiting", "fetching", "found", "loading", "ready", "later", "refused"]
Event = Literal["fetching", "progress", "fetched", "loading", "loaded", "refused"]

REPORT_S = 10.0
"""How often the progress of a long task is an event."""
_NO_ERROR = ErrorInfo(code="", message="")


@dataclass(slots=True)
class ModelRow:
    """One model. `done_bytes` of `total_bytes` (0: unknown) belong to the task of `action`.

    The step `later` is that of a model which is loaded on first use; a `refused` one has an
    `error`. `memory_bytes` are those that it has reserved on the device.
    """

    name: str
    kind: str = ""
    step: Step = "waiting"
    action: Action | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    began_s: float = 0.0
    reported_s: float = 0.0
    downloaded_bytes: int = 0
    progress: float = 0.0
    memory_bytes: int = 0
    error: ErrorInfo = _NO_ERROR

    def bytes_per_s(self, now_s: float) -> float:
        """The mean speed of the task in progress."""
        return self.done_bytes / max(now_s - self.began_s, 1e-3)


class StartState:
    """The rows of a start; `notify` is called with each event, on the thread that causes it.

    `device` and `budget_bytes` describe the device and the memory for models. Once it is not
    `is_open`, states of models are no events of the start.
    """

    def __init__(
        self,
        notify: Callable[[Event, ModelRow], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notify = notify
        self.clock = clock
        self.rows: dict[str, ModelRow] = {}
        self.device = ""
        self.budget_bytes = 0
        self.is_open = True

    def expect(self, models: Iterable[tuple[str, str]]) -> None:
        """Set the names and the kinds (maybe empty) of the models that will be served."""
        self.rows = {name: ModelRow(name, kind) for name, kind in models}

    def set_kinds(self, models: Iterable[tuple[str, str]]) -> None:
        """Set the kinds of the models, whose files are there now."""
        for name, kind in models:
            row = self.rows.setdefault(name, ModelRow(name))
            row.kind, row.step, row.action = kind, "found", None

    @property
    def memory_bytes(self) -> int:
        """The device memory of all models."""
        return sum(row.memory_bytes for row in self.rows.values())

    @property
    def refused(self) -> list[ModelRow]:
        """The models that cannot be served now."""
        return [row for row in self.rows.values() if row.step == "refused"]

    def take(self, status: ModelStatus, memory_bytes: int) -> None:
        """Record the state of a model in the engine."""
        row = self.rows.setdefault(status.model, ModelRow(status.model))
        before = row.step
        row.memory_bytes, row.progress = memory_bytes, status.progress
        row.step = _step_of(status)
        row.error = status.error or _NO_ERROR
        events: dict[Step, Event] = {"loading": "loading", "ready": "loaded", "refused": "refused"}
        if self.is_open and row.step != before and row.step in events:
            if row.step == "loading":
                row.began_s = self.clock()
            self.notify(events[row.step], row)


class StartProgress:
    """A `core.weights.progress.Progress` that fills the rows of `state`."""

    def __init__(self, state: StartState) -> None:
        self._state = state
        self._row = ModelRow("")

    def begin(self, model: str) -> None:
        """Begin with a model."""
        self.stop()
        if self._row.step == "fetching":
            self._row.step = "found"
        self._row = self._state.rows.setdefault(model, ModelRow(model))

    def start(self, action: Action, total_bytes: int) -> None:
        """Begin a task of the model, and end the previous one."""
        self._end_download()
        row = self._row
        row.step, row.action, row.done_bytes, row.total_bytes = "fetching", action, 0, total_bytes
        row.began_s = row.reported_s = self._state.clock()
        if action != "Verifying":  # that of files in the cache is no news
            self._state.notify("fetching", row)

    def advance(self, num_bytes: int) -> None:
        """Add to the task; files that are hashed outside a task are none."""
        row, now_s = self._row, self._state.clock()
        if row.action is None:
            return
        row.done_bytes += num_bytes
        if now_s - row.reported_s >= REPORT_S:
            row.reported_s = now_s
            self._state.notify("progress", row)

    def stop(self) -> None:
        """End the tasks of the model, finished or failed."""
        self._end_download()

    def _end_download(self) -> None:
        row = self._row
        if row.action == "Downloading" and row.done_bytes >= row.total_bytes:
            row.downloaded_bytes += row.done_bytes
            self._state.notify("fetched", row)
        row.action = None


def _step_of(status: ModelStatus) -> Step:
    if status.error is not None or status.state == "failed":
        return "refused"
    return "later" if status.state == "unloaded" else status.state

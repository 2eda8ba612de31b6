"""Progress of downloads, conversions and checks of weights.

Owns the protocol, a silent implementation, a terminal bar and a wrapper that makes one task of
several downloads. Knows no models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import rich.progress

Action = Literal["Downloading", "Reading", "Converting", "Verifying"]


class Progress(Protocol):
    """Receives progress of downloads, conversions and checks, from one thread at a time."""

    def begin(self, model: str) -> None:
        """Begin with a model: the following tasks are for it."""

    def start(self, action: Action, total_bytes: int) -> None:
        """Begin a task, and end the previous one; 0 bytes: length unknown."""

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the current task."""

    def stop(self) -> None:
        """End all tasks, finished or failed."""


class SilentProgress:
    """Ignores all progress."""

    def begin(self, model: str) -> None:
        """Do nothing on a model."""

    def start(self, action: Action, total_bytes: int) -> None:
        """Do nothing on start."""

    def advance(self, num_bytes: int) -> None:
        """Do nothing on advance."""

    def stop(self) -> None:
        """Do nothing on stop."""


class WholeDownload:
    """Shows the downloads of several files as one task of `total_bytes` of `progress`."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._is_started = False

    def begin(self, model: str) -> None:
        """Begin with a model."""
        self._progress.begin(model)

    def start(self, action: Action, total_bytes: int) -> None:
        """Begin the task with its first download."""
        if not self._is_started:
            self._is_started = True
            self._progress.start(action, self._total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the task."""
        self._progress.advance(num_bytes)

    def stop(self) -> None:
        """End all tasks."""
        self._progress.stop()


class RichProgress:
    """A progress bar on a terminal's stderr, or in a notebook; prints nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._model = ""

    def begin(self, model: str) -> None:
        """Name the model in the following bars."""
        self._model = model

    def start(self, action: Action, total_bytes: int) -> None:
        """Show a bar, animated if the length is unknown."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        if self._bar is None:
            console = Console(stderr=True)
            columns = (TextColumn("{task.description}", markup=False), BarColumn())
            self._bar = Progress(
                *columns,
                DownloadColumn(),
                TransferSpeedColumn(),
                console=console,
                transient=True,
                disable=not (console.is_terminal or console.is_jupyter),
            )
            self._bar.start()
        if self._task is not None:
            self._bar.remove_task(self._task)
        label = f"{action} {self._model}".rstrip()
        self._task = self._bar.add_task(label, total=total_bytes or None)

    def advance(self, num_bytes: int) -> None:
        """Advance the progress bar."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, num_bytes)

    def stop(self) -> None:
        """Hide the progress bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

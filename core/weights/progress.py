"""Progress of downloads, conversions and checks of weights.

Owns the protocol, a silent implementation and a terminal bar. Knows no models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Progress(Protocol):
    """Receives progress of downloads, conversions and checks, from one thread, in order."""

    def start(self, label: str, total_bytes: int) -> None:
        """Begin a task, and end the previous one; 0 bytes: length unknown."""

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the current task."""

    def stop(self) -> None:
        """End all tasks, finished or failed."""


class SilentProgress:
    """Ignores all progress."""

    def start(self, label: str, total_bytes: int) -> None:
        """Do nothing on start."""

    def advance(self, num_bytes: int) -> None:
        """Do nothing on advance."""

    def stop(self) -> None:
        """Do nothing on stop."""


class RichProgress:
    """A progress bar on a terminal's stderr, or in a notebook; prints nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, label: str, total_bytes: int) -> None:
        """Show a bar, animated if the length is unknown."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        if self._bar is None:
            console = Console(stderr=True)
            columns = (TextColumn("{task.description}", markup=False), BarColumn())
            self._bar = Progress(
                *columns,
                DownloadColumn(),
                console=console,
                transient=True,
                disable=not (console.is_terminal or console.is_jupyter),
            )
            self._bar.start()
        if self._task is not None:
            self._bar.remove_task(self._task)
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

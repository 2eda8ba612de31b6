"""The progress of long work on weights.

Owns the protocol, the silent watcher and the terminal's. Knows no models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Progress(Protocol):
    """Watches downloads, conversions and checks. Calls come from one thread, in order."""

    def start(self, label: str, total_bytes: int) -> None:
        """A piece of work begins (and the one before it is over); 0 bytes: length unknown."""

    def advance(self, num_bytes: int) -> None:
        """So many more bytes of the current piece are done."""

    def stop(self) -> None:
        """Nothing more is going on, be it done or failed."""


class SilentProgress:
    """Shows nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        """Ignore the beginning."""

    def advance(self, num_bytes: int) -> None:
        """Ignore the advance."""

    def stop(self) -> None:
        """Ignore the end."""


class RichProgress:
    """A bar on the terminal's standard error, or in a notebook; it leaves no trace in files."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, label: str, total_bytes: int) -> None:
        """Show a bar, a moving one where the length is unknown."""
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
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, num_bytes)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

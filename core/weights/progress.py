"""How long work on weights tells its watcher how far it is.

Owns the protocol and the silent watcher. Knows neither terminals nor models.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Watches downloads, conversions and checks. Calls come from one thread, in order."""

    def start(self, label: str, total_bytes: int) -> None:
        """A piece of work begins (and the one before it is over); 0 bytes: length unknown."""
        ...

    def advance(self, num_bytes: int) -> None:
        """So many more bytes of the current piece are done."""
        ...


class SilentProgress:
    """Watches and says nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        """Ignore the beginning."""

    def advance(self, num_bytes: int) -> None:
        """Ignore the advance."""

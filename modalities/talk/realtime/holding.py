"""The limits of what all sessions hold together, and of the sessions of one key.

Owns the counts. Knows neither what is held nor sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from triptych.core.errors import RateLimited
from triptych.core.options.config import ServerOptions
from triptych.modalities.service import HoldLimit


class HeldBytes:
    """The share of one session in the `most` bytes of all: at least `base`."""

    def __init__(self, limit: HoldLimit, most: float, base: float = 0.0) -> None:
        self._limit = limit
        self._most = most
        self._base = base
        self._num_bytes = 0.0
        self.resize(0)

    def resize(self, num_bytes: float) -> None:
        """Hold `num_bytes` in addition to the base. Raises `Overloaded`, and changes nothing."""
        new = self._base + num_bytes
        self._limit.take(new - self._num_bytes, self._most)
        self._num_bytes = new

    def shrink(self, num_bytes: float) -> None:
        """Hold `num_bytes` in addition to the base, if that is less than before."""
        if self._base + num_bytes < self._num_bytes:
            self.resize(num_bytes)

    def release(self) -> None:
        """Give back all that the session holds."""
        self._base = 0.0
        self.resize(0)


def unlimited() -> HeldBytes:
    """Return a count without a limit."""
    return HeldBytes(HoldLimit(""), float("inf"))


@dataclass(slots=True, kw_only=True)
class SessionCount:
    """The open sessions: at most `most` of one key, and `most_bytes` of all together.

    `message_bytes` is the longest message of a client. As many may be queued, and as many again be
    in the arriving message or in work, so each session holds twice this.
    """

    most: int
    most_bytes: float = float("inf")
    message_bytes: int = 0
    _num_open: Counter[str] = field(default_factory=Counter)
    _held: HoldLimit = field(
        default_factory=lambda: HoldLimit(
            "The realtime sessions of all clients hold as much as they may together"
            " (--max-realtime-bytes): delete items or close sessions, or try again later."
        )
    )

    @classmethod
    def of(cls, options: ServerOptions) -> Self:
        """The count with the limits of `options`."""
        return cls(
            most=options.max_realtime_sessions_per_key,
            most_bytes=options.max_realtime_bytes,
            message_bytes=options.max_request_bytes,
        )

    def check(self, key: str) -> None:
        """Raise `RateLimited` if the key may open no more, `Overloaded` if there is no room."""
        if self._num_open[key] >= self.most:
            raise RateLimited(
                f"This key has {self.most} sessions open (--max-realtime-sessions-per-key):"
                " close one.",
                retry_after_s=5,
            )
        self._held.check(2 * self.message_bytes, self.most_bytes)

    @contextmanager
    def hold(self, key: str) -> Iterator[HeldBytes]:
        """Count a session while it is open, and what it holds. Raises as `check` does."""
        self.check(key)
        held = HeldBytes(self._held, self.most_bytes, 2 * self.message_bytes)
        self._num_open[key] += 1
        try:
            yield held
        finally:
            self._num_open[key] -= 1
            held.release()

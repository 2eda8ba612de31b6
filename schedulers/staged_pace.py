"""When the next piece of a job's answer is due, for jobs whose work is done stage by stage.

Owns what the staged scheduler asks of a request: how many units it is, and by when its listener
or reader needs more. Knows nothing of the order among jobs.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from triptych.core.staged_plan import Stage


class JobPace(Protocol):
    """One job's size and deadlines. Made from its request when it is submitted."""

    @property
    def num_units(self) -> int:
        """How many units the job is; at least one."""
        ...

    def first_stage(self, unit: int) -> Stage:
        """The stage that a unit begins with."""
        ...

    def due_s(self) -> float:
        """By when the unit after those sent must be over; infinity where nobody waits for it."""
        ...

    def not_before_s(self) -> float:
        """When it is early enough to go on; 0 for at once."""
        ...

    def send(self, payload: Any, now_s: float) -> Any:
        """Note that `payload` goes out now; returns it with the job's running counts filled in."""
        ...

    def cancelled(self) -> Any:
        """The last payload of a job that was cancelled; `None` for none."""
        ...


class TargetPace:
    """A job that is one unit, due a while after it arrived."""

    num_units = 1

    def __init__(self, first_stage: Stage, due_s: float = math.inf, cancelled: Any = None) -> None:
        self._first_stage = first_stage
        self._due_s = due_s
        self._cancelled = cancelled

    def first_stage(self, unit: int) -> Stage:
        """The stage that the job begins with."""
        return self._first_stage

    def due_s(self) -> float:
        """The same all the time."""
        return self._due_s

    def not_before_s(self) -> float:
        """At once."""
        return 0.0

    def send(self, payload: Any, now_s: float) -> Any:
        """The payload as it is."""
        return payload

    def cancelled(self) -> Any:
        """What the job was given for this end."""
        return self._cancelled

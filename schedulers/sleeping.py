"""The sleep of an engine: its models are out of memory, and jobs are refused until it is woken.

Owns whether an engine sleeps, the models to load again, and who waits for either. The model manager
unloads and loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.core.errors import Asleep, TriptychError

ChangeDone = Callable[[TriptychError | None], None]
"""Receives the outcome of a change of the models."""


class Sleeping:
    """Whether the engine sleeps."""

    def __init__(self) -> None:
        self.is_on = False
        self._names: list[str] = []
        self._waiting: list[ChangeDone] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits until the memory is free."""
        return bool(self._waiting)

    def begin(self, names: Sequence[str], done: ChangeDone) -> None:
        """Fall asleep; `names` are the models in memory. A second call keeps those of the first."""
        if not self.is_on:
            self.is_on, self._names = True, list(names)
        self._waiting.append(done)

    def note_free(self) -> None:
        """Answer those who wait: no model is in memory any more."""
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(None)

    def end(self) -> list[str]:
        """Wake up, and return the models to load again."""
        self.is_on, names = False, self._names
        self._names = []
        self.note_free()  # callers that still wait must not wait for ever
        return names

    def check(self) -> None:
        """Raise `Asleep` if the engine sleeps."""
        if self.is_on:
            raise Asleep("The server is asleep: POST /wake_up wakes it.", retry_after_s=5.0)


class Waking:
    """Counts the loads of a waking engine, and passes their first error to `done`."""

    def __init__(self, num_loads: int, done: ChangeDone) -> None:
        self._num_left = num_loads
        self._done = done
        self._error: TriptychError | None = None
        if not num_loads:
            done(None)

    def note(self, error: TriptychError | None) -> None:
        """One load has ended."""
        self._error = self._error or error
        self._num_left -= 1
        if not self._num_left:
            self._done(self._error)

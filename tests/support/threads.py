"""Where work runs: the threads on which a function is called."""

from __future__ import annotations

import threading
from typing import Any

import pytest


def threads_of(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[str]:
    """The names of the threads on which `place`'s function of that name will have run, in order."""
    function = getattr(place, name)
    found: list[str] = []

    def watched(*args: Any, **options: Any) -> Any:
        found.append(threading.current_thread().name)
        return function(*args, **options)

    monkeypatch.setattr(place, name, watched)
    return found


def are_aside(found: list[str]) -> bool:
    """Whether all of that ran, and none of it where the event loop of a test does."""
    return bool(found) and threading.main_thread().name not in found

"""Cache hits and misses during start-up: weights, kernels and other files, found or created.

Owns the `Lookup` record and its delivery to listeners. Code that looks something up reports here
without knowing the listeners; without a listener nothing is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from triptych.core.process.logs import fields

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_listeners: list[Callable[[Lookup], object]] = []


class Lookup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One item that start-up needs: found (`is_hit`), or created in `seconds`.

    `phase` groups items of one kind, `what` names this one. `is_promised`: a bundle claims to have
    it. `reason` is the reason of a miss.
    """

    phase: str
    what: str
    seconds: float
    is_hit: bool
    is_promised: bool = False
    reason: str = ""


@contextmanager
def listen_to_lookups(listener: Callable[[Lookup], object]) -> Iterator[None]:
    """Call `listener` for every lookup inside the block, on the thread that looks up."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


@dataclass(slots=True)
class Search:
    """A lookup in progress: a hit, unless `record_miss` is called inside it."""

    phase: str
    is_promised: bool = False
    is_hit: bool = True
    reason: str = ""


_current: ContextVar[Search | None] = ContextVar("search", default=None)


def record_miss(reason: str) -> None:
    """Mark the current lookup as a miss. The first reason, nearest to the cause, is kept."""
    search = _current.get()
    if search is not None:
        search.is_hit, search.reason = False, search.reason or reason


@contextmanager
def timed_lookup(phase: str, what: str) -> Iterator[Search]:
    """Time the lookup of one item, creation included, and report it to the listeners.

    A miss of a promised item logs a warning. A block that raises is not recorded. A lookup nested
    in one of the same phase is part of the outer one.
    """
    outer = _current.get()
    if outer is not None and outer.phase == phase:
        yield outer
        return
    started_s = time.monotonic()
    search = Search(phase)
    token = _current.set(search)
    try:
        yield search
    finally:
        _current.reset(token)
    lookup = Lookup(
        phase=phase,
        what=what,
        seconds=time.monotonic() - started_s,
        is_hit=search.is_hit,
        is_promised=search.is_promised,
        reason=search.reason,
    )
    if lookup.is_promised and not lookup.is_hit:
        named = fields(phase=phase, what=what, reason=search.reason)
        _log.warning("not usable from the bundle, so it was created", extra=named)
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        listener(lookup)

"""Hits and misses of a start: what was found ready, what had to be made, and why.

Owns the record and its way to whoever shows it. What looks something up says so here; it need not
know who listens. Without a listener nothing is kept. Knows nothing of what is looked up.
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
    """One thing that a start needs: found (`is_hit`), or made in `seconds`.

    `phase` groups things of a kind, `what` names this one. `is_promised`: a bundle says that it has
    it; then `reason` tells why it missed all the same.
    """

    phase: str
    what: str
    seconds: float
    is_hit: bool
    is_promised: bool = False
    reason: str = ""


@contextmanager
def listening(listener: Callable[[Lookup], object]) -> Iterator[None]:
    """Hand every lookup of this process to `listener`, from whatever thread, until the end."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


@dataclass(slots=True)
class Search:
    """A lookup under way: a hit, unless `missed` is called inside it."""

    phase: str
    is_promised: bool = False
    is_hit: bool = True
    reason: str = ""


_current: ContextVar[Search | None] = ContextVar("search", default=None)


def missed(reason: str) -> None:
    """What is being looked for has to be made. The first reason, nearest to the cause, is kept."""
    search = _current.get()
    if search is not None:
        search.is_hit, search.reason = False, search.reason or reason


@contextmanager
def looking_for(phase: str, what: str) -> Iterator[Search]:
    """Time the search for a thing, and the making of it; say so to the listeners at the end.

    A promised thing that missed is a warning. What raises is not recorded. A search inside another
    of its phase is a part of that.
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
        _log.warning("a bundle promised it, and it had to be made", extra=named)
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        listener(lookup)

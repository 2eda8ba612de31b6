"""Captured steps of every modality, each compared bit by bit with the same step run eagerly.

Also counts what the host waits for while rows decode, without that comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

from place import Place, Record
from workers import run_cases


def run(place: Place) -> Iterator[Record]:
    """Yield a record of each case."""
    yield from run_cases(place, ("replay_cases",))

"""The order of waiting prompts under `--schedule-policy lpm`: longest prefix match first.

Owns the comparison, and who is overtaken by it. As in SGLang (Zheng et al., SGLang: Efficient
Execution of Structured Language Model Programs, 2024), the prompt with the most cached tokens is
first: what it finds could be evicted while it waits. Unlike there, a prompt that others overtook
`MAX_OVERTAKEN` times keeps the place of its arrival, and clients still take turns, so that none
waits forever.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.state import SequenceState

MAX_OVERTAKEN = 16
"""Times that later prompts overtake a waiting one."""
_MAX_SHARED = 16
"""Beginnings that are remembered while rows are compared."""
_MAX_SORTED = 128
"""Waiting prompts that are compared for one step; later ones keep their order."""


def by_prefix(waiting: Iterable[SequenceState], pool: PagePool) -> Iterable[SequenceState]:
    """The waiting rows, sorted by the length of their cached prefixes, longest first."""
    rest = iter(waiting)
    rows = list(islice(rest, _MAX_SORTED))
    lengths = _CachedLengths(pool)

    def place(row: SequenceState) -> tuple[bool, int]:
        is_due = row.num_times_overtaken >= MAX_OVERTAKEN
        return not is_due, 0 if is_due else -lengths.of(row.lookup_keys(pool.page_size))

    rows.sort(key=place)
    return chain(rows, rest)


def overtaken_by(
    admitted: Sequence[SequenceState], waiting: Iterable[SequenceState]
) -> list[SequenceState]:
    """The waiting rows of whose client a later row is admitted, once for each such row."""
    if not admitted:
        return []
    last = max(row.rank for row in admitted)
    begun, ranks = set(admitted), defaultdict[str, list[tuple[int, int]]](list)
    for row in admitted:
        insort(ranks[row.client], row.rank)
    behind: list[SequenceState] = []
    for row in waiting:  # of thousands, which wait for other clients: each must cost little
        if row.rank > last:
            break
        own = ranks.get(row.client)
        if own and row.rank < own[-1] and row not in begun and row.can_step:
            behind += [row] * (len(own) - bisect_right(own, row.rank))
    return behind


class _CachedLengths:
    """How many pages rows would find; a beginning that several share is looked up once."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._found: list[tuple[int, bytes]] = []
        self._is_plain = pool.snapshots is None and pool.windows is None

    def of(self, keys: Sequence[bytes]) -> int:
        """The number of pages for a row with these keys."""
        known = (n for n, key in self._found if n <= len(keys) and keys[n - 1] == key)
        start = max(known, default=0)  # a page's key depends on all before it
        length = start + len(self._pool.peek(keys[start:]))
        if self._is_plain and length > start and len(self._found) < _MAX_SHARED:
            self._found.append((length, keys[length - 1]))
        return length

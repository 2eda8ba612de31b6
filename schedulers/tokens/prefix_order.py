"""The order of waiting prompts under `--schedule-policy lpm`: longest prefix match first.

Owns the comparison, and who is overtaken by it. As in SGLang (Zheng et al., SGLang: Efficient
Execution of Structured Language Model Programs, 2024), the prompt with the most cached tokens is
first: what it finds could be evicted while it waits. Unlike there, a prompt that others overtook
`MAX_OVERTAKEN` times keeps the place of its arrival, and clients still take turns, so that nobody
waits forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.state import SequenceState

MAX_OVERTAKEN = 16
"""Times that later prompts overtake a waiting one."""
_MAX_SORTED = 128
"""Waiting prompts that are compared for one step; later ones keep their order."""


def by_prefix(waiting: Iterable[SequenceState], pool: PagePool) -> Iterable[SequenceState]:
    """The waiting rows, sorted by the length of their cached prefixes, longest first."""
    rest = iter(waiting)
    rows = list(islice(rest, _MAX_SORTED))

    def place(row: SequenceState) -> tuple[bool, int]:
        is_due = row.num_times_overtaken >= MAX_OVERTAKEN
        return not is_due, 0 if is_due else -len(pool.peek(row.lookup_keys(pool.page_size)))

    rows.sort(key=place)
    return chain(rows, rest)


def overtaken_by(
    admitted: Sequence[SequenceState], waiting: Iterable[SequenceState]
) -> list[SequenceState]:
    """The waiting rows of whose client a later row is admitted, once for each such row."""
    if not admitted:
        return []
    last = max(row.rank for row in admitted)
    behind = []
    for row in waiting:
        if row.rank > last:
            break
        if row not in admitted and row.can_step:
            later = (each for each in admitted if each.rank > row.rank)
            behind += [row for each in later if each.client == row.client]
    return behind

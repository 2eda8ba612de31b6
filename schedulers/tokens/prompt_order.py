"""The order of prompts that share a step with a long one.

Owns the comparison alone: `policy` makes it for every step that has a long prompt.

The work left decides, but only where it differs clearly: a prompt passes the long one if it has at
most half of its work left. Those that pass it are sorted by the number of binary digits of their
tokens left, and keep their order where that is the same. So prompts of like length are computed one
after the other, not all at once, and few prompts are begun at any time: about one for each doubling
of the length. Plain shortest remaining time first would also let short prompts without end stop a
long one; here its half of each step prevents that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from triptych.schedulers.tokens.scheduled_row import ScheduledRow
from triptych.schedulers.tokens.state import SequenceState


def split_by_work(
    long: ScheduledRow, rows: Iterable[SequenceState], num_left: Callable[[SequenceState], int]
) -> tuple[list[SequenceState], list[SequenceState]]:
    """The rows that go before the rest of the `long` prompt, and those that go after it.

    The first have a higher priority, or the same and at most half of the work; they are sorted by
    priority and work. The others keep their order. `num_left` returns a row's tokens to compute.
    """
    priority, most = long.unit.rank[0], (long.unit.num_tokens - long.start) // 2
    first, after = list[tuple[int, int, SequenceState]](), list[SequenceState]()
    for row in rows:
        work, rank = num_left(row), row.rank[0]
        if rank < priority or (rank == priority and work <= most):
            first.append((rank, work.bit_length(), row))
        else:
            after.append(row)
    first.sort(key=lambda entry: entry[:2])
    return [row for _, _, row in first], after

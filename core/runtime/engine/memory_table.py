"""A table of a device's memory, for operators, logged before weights are read.

Owns the layout. The ledger knows the reservations; the loaders know their purposes.
"""

from __future__ import annotations

from collections.abc import Mapping

from triptych.core.ledger import mib

_CACHES = frozenset(
    ("kv", "vision-cache", "prompts", "voices", "codec-state", "images", "recordings")
)
_COLUMNS = ("weights", "caches", "activations")


def memory_table(reserved: Mapping[str, int], left_bytes: int) -> list[str]:
    """Format the lines of a table: a row for each model that has reservations (`model/purpose`)."""
    sizes: dict[str, dict[str, int]] = {}
    for owner, num_bytes in sorted(reserved.items()):
        model, _, purpose = owner.rpartition("/")
        row = sizes.setdefault(model, dict.fromkeys(_COLUMNS, 0))
        row[_column(purpose)] += num_bytes
    rows: list[tuple[str, ...]] = [("model", *_COLUMNS)]
    rows += [(model, *(mib(row[name]) for name in _COLUMNS)) for model, row in sizes.items()]
    rows.append(("left", "", "", mib(left_bytes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _column(purpose: str) -> str:
    """The column of a purpose: everything except caches and activations is weights."""
    if purpose == "activations":
        return purpose
    return "caches" if purpose in _CACHES else "weights"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *rest = (
        f"{cell:{'<' if at == 0 else '>'}{width}}"
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join((first, *rest)).rstrip()

"""A table of a device's memory, for operators, logged before weights are read.

Owns the columns. The ledger knows the reservations; the loaders know their purposes.
"""

from __future__ import annotations

from collections.abc import Mapping

_CACHES = frozenset(
    (
        "kv",
        "kv-host",
        "draft-kv",
        "states",
        "vision-cache",
        "prompts",
        "voices",
        "codec-state",
        "images",
        "recordings",
    )
)
_COLUMNS = ("weights", "caches", "activations")
_MIB = 2**20


def memory_table(reserved: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The MiB of each model with reservations (`model/purpose`), by column."""
    sizes: dict[str, dict[str, int]] = {}
    for owner, num_bytes in sorted(reserved.items()):
        model, _, purpose = owner.rpartition("/")
        row = sizes.setdefault(model, dict.fromkeys(_COLUMNS, 0))
        row[_column(purpose)] += num_bytes
    return {
        model: {f"{name}_mib": round(num_bytes / _MIB, 1) for name, num_bytes in row.items()}
        for model, row in sizes.items()
    }


def _column(purpose: str) -> str:
    """The column of a purpose: everything except caches and activations is weights."""
    if purpose in ("activations", "draft-activations"):
        return "activations"
    return "caches" if purpose in _CACHES else "weights"

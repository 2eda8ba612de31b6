"""The table of who gets what."""

from __future__ import annotations

from triptych.core.ledger import Ledger
from triptych.core.runtime.engine.memory_table import memory_table

MIB = 2**20


def test_models_in_rows_and_what_they_take_in_columns() -> None:
    ledger = Ledger(1000 * MIB)
    for owner, size in (
        ("chat/weights", 270),
        ("chat/kv", 100),
        ("chat/activations", 20),
        ("org/draw/transformer", 200),
        ("org/draw/vae", 50),
        ("org/draw/images", 10),
    ):
        ledger.reserve(owner, size * MIB)
    assert memory_table(ledger.by_owner()) == {
        "chat": {"weights_mib": 270.0, "caches_mib": 100.0, "activations_mib": 20.0},
        "org/draw": {"weights_mib": 250.0, "caches_mib": 10.0, "activations_mib": 0.0},
    }

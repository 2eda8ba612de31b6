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
    assert memory_table(ledger.by_owner(), ledger.available_bytes) == [
        "model       weights     caches  activations",
        "chat      270.0 MiB  100.0 MiB     20.0 MiB",
        "org/draw  250.0 MiB   10.0 MiB      0.0 MiB",
        "left                              350.0 MiB",
    ]

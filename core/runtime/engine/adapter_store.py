"""The adapters of a loaded text model: from their files into slots, and out again.

Owns the memory of each in the ledger, and the check that an adapter's files are those that requests
name by their digest. Chooses neither adapters nor slots: `schedulers.tokens.adapters` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from triptych.core.errors import Overloaded
from triptych.core.ledger import Reservation
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.decoders.adapters import DecoderAdapters
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.peft import TextAdapter, check_digest


class AdapterStore:
    """Implements `schedulers.tokens.adapters.AdapterLoader`.

    `reserve` takes bytes from the ledger. A slot is loaded on any thread, and cleared between steps
    that use it.
    """

    def __init__(
        self,
        adapters: DecoderAdapters,
        options: ModelOptions,
        reserve: Callable[[int], Reservation],
    ) -> None:
        self.num_slots = adapters.room.num_slots
        self._adapters, self._options, self._reserve = adapters, options, reserve
        self._lock = threading.Lock()
        self._held: dict[int, Reservation | None] = {}
        self._is_closed = False

    def load(self, place: str, digest: str, slot: int) -> None:
        """Load the adapter at `place` into an empty slot.

        Raises `WeightsError` for an adapter that this model cannot take, or whose files have
        changed since `digest` was computed, and `MemoryBudgetExceeded`.
        """
        adapter = TextAdapter.read(place, self._options)
        check_digest(adapter.file, digest)
        self._adapters.modules.check(adapter, self._adapters.room)
        num_bytes = self._adapters.num_bytes(adapter)
        reservation = self._reserve(num_bytes) if num_bytes else None
        with self._lock:
            try:
                self._fill(slot, adapter)
                check_digest(adapter.file, digest)
            except BaseException:
                self._adapters.clear(slot)
                if reservation is not None:
                    reservation.release()
                raise
            self._held[slot] = reservation
            if reservation is not None:
                reservation.commit()

    def drop(self, slot: int) -> None:
        """Clear a slot that no step in flight uses, and release its bytes."""
        reservation = self._held.pop(slot)
        self._adapters.clear(slot)
        if reservation is not None:
            reservation.release()

    def close(self) -> None:
        """Drop every adapter. A load that is under way fails."""
        with self._lock:
            self._is_closed = True
            for slot in tuple(self._held):
                self.drop(slot)

    def _fill(self, slot: int, adapter: TextAdapter) -> None:
        if self._is_closed:
            raise Overloaded("The model was unloaded; try again.", retry_after_s=1.0)
        with Checkpoint.open_file(adapter.file, {}) as file:
            self._adapters.put(slot, adapter, file.read)

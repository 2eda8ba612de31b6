"""Loads adapters into a running image model, and drops them.

Owns the memory of each in the ledger, and the check that an adapter's files are those that it was
named for: it is known by the digest of its content. `scheduling.adapters` chooses when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from triptych.core.errors import Overloaded
from triptych.core.ledger import Reservation
from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.peft import check_digest, locate_adapter
from triptych.modalities.diffusion.engine.adapters.adapters import Adapters, file_bytes, pairs_of
from triptych.modalities.diffusion.engine.adapters.files import open_adapter_file
from triptych.modalities.diffusion.engine.loading.components import Components, DtypeOf


class ImageAdapterStore:
    """Implements `scheduling.adapters.Store`. `reserve` takes bytes from the ledger."""

    def __init__(
        self,
        adapters: Adapters,
        components: Components,
        config: Config,
        *,
        dtype: DtypeOf,
        reserve: Callable[[int], Reservation],
    ) -> None:
        self._adapters, self._components, self._config = adapters, components, config
        self._dtype, self._reserve = dtype, reserve
        self._held: dict[str, Reservation] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def load(self, digest: str, place: str) -> None:
        """Load an adapter, on any thread. Raises `WeightsError`, and `MemoryBudgetExceeded`."""
        check_digest(locate_adapter(place, self._config.models), digest)
        with open_adapter_file(place, self._config.models) as file, self._lock:
            if self._is_closed:
                raise Overloaded("The model was unloaded; try again.", retry_after_s=1.0)
            reservation = self._reserve(file_bytes(file, self._dtype))
            try:
                self._add(digest, file)
            except BaseException:
                reservation.release()
                raise
            reservation.commit()
            self._held[digest] = reservation

    def drop(self, digest: str) -> None:
        """Drop an adapter that no image uses."""
        self._adapters.remove(digest)
        self._held.pop(digest).release()

    def close(self) -> None:
        """Release the memory of all: the model is gone. A load that is under way fails."""
        with self._lock:
            self._is_closed = True
            while self._held:
                self._held.popitem()[1].release()

    @torch.inference_mode()
    def _add(self, digest: str, file: Checkpoint) -> None:
        pairs = pairs_of(file, self._components, self._config.adapters.max_lora_rank)
        self._adapters.add({digest: pairs})
        end_of_work(self._adapters.device)()

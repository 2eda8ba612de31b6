"""The memory budget of a device: reserved bytes by owner.

Owns the count, not the memory. Weights, caches and activations of all models reserve from one
ledger per device. A reservation is made first, then backed by an allocation (`commit`), then
released once. Knows nothing of torch or of the contents of the memory.
"""

from __future__ import annotations

import threading

from triptych.core.errors import MemoryBudgetExceeded, ModelTooLarge


class Reservation:
    """Bytes reserved for one owner. A context manager that releases them on exit."""

    def __init__(self, ledger: Ledger, owner: str, num_bytes: int) -> None:
        self.owner = owner
        self._ledger = ledger
        self._num_bytes = num_bytes
        self._is_committed = False
        self._is_released = False

    @property
    def num_bytes(self) -> int:
        """The reserved bytes; 0 after release."""
        return self._num_bytes

    @property
    def is_committed(self) -> bool:
        """Whether the memory has been allocated."""
        return self._is_committed

    def commit(self) -> None:
        """Record that the bytes are now allocated on the device."""
        assert not self._is_released, f"{self.owner}: commit after release"
        self._is_committed = True

    def resize(self, num_bytes: int) -> None:
        """Change the size to `num_bytes`. Raises `MemoryBudgetExceeded` without any change."""
        assert not self._is_released, f"{self.owner}: resize after release"
        self._ledger._change(self, num_bytes)

    def release(self) -> None:
        """Release the bytes; a second call is a bug."""
        assert not self._is_released, f"{self.owner}: released twice"
        self._ledger._change(self, 0)
        self._is_released, self._is_committed = True, False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_released:
            self.release()


class Ledger:
    """Reservations of `capacity_bytes` by owner. Thread-safe: loader threads reserve.

    The capacity is a part of the device's `free_bytes`, if these are known.
    """

    def __init__(self, capacity_bytes: int, free_bytes: int | None = None) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        self.capacity_bytes = capacity_bytes
        self._free_bytes = capacity_bytes if free_bytes is None else free_bytes
        self._lock = threading.Lock()
        self._held: set[Reservation] = set()
        self._used_bytes = 0

    @property
    def available_bytes(self) -> int:
        """The unreserved bytes."""
        return self.capacity_bytes - self._used_bytes

    def resume(self, capacity_bytes: int) -> None:
        """Take over the capacity of an earlier ledger of this device, if that much is free.

        After a restart, other processes may hold memory that was free before, and a model that
        fitted would no longer fit. Call it before any reservation.
        """
        assert not self._held, "resumed while in use"
        self.capacity_bytes = min(capacity_bytes, self._free_bytes)

    def reserve(self, owner: str, num_bytes: int) -> Reservation:
        """Reserve `num_bytes` for `owner` (`model/weights`, `model/kv`, ...).

        Raises `MemoryBudgetExceeded` with the list of owners if they are not free, and
        `ModelTooLarge` if they would not be free without all other models either.
        """
        reservation = Reservation(self, owner, 0)
        self._change(reservation, num_bytes)
        return reservation

    def most_bytes(self, model: str) -> int:
        """Bytes that would be free for `model` if no other model had reservations."""
        with self._lock:
            return self._most_bytes(model)

    def by_owner(self) -> dict[str, int]:
        """Return the bytes of each owner, the largest first."""
        with self._lock:
            return self._by_owner()

    def check(self) -> None:
        """Assert that the totals are consistent."""
        with self._lock:
            total = sum(reservation.num_bytes for reservation in self._held)
            assert total == self._used_bytes, f"ledger off: {total} held, {self._used_bytes} booked"
            assert 0 <= self._used_bytes <= self.capacity_bytes, "ledger overdrawn"
            assert all(reservation.num_bytes > 0 for reservation in self._held)

    def _change(self, reservation: Reservation, num_bytes: int) -> None:
        if num_bytes < 0:
            raise ValueError("num_bytes must not be negative")
        with self._lock:
            growth = num_bytes - reservation._num_bytes
            if growth > self.available_bytes:
                raise self._refusal(reservation.owner, growth)
            self._used_bytes += growth
            reservation._num_bytes = num_bytes
            (self._held.add if num_bytes else self._held.discard)(reservation)

    def _by_owner(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for reservation in self._held:
            totals[reservation.owner] = totals.get(reservation.owner, 0) + reservation.num_bytes
        return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))

    def _most_bytes(self, model: str) -> int:
        own = sum(held.num_bytes for held in self._held if model_of(held.owner) == model)
        return self.capacity_bytes - own

    def _refusal(self, owner: str, growth: int) -> MemoryBudgetExceeded:
        if growth > (most_bytes := self._most_bytes(model_of(owner))):
            needed = growth + self.capacity_bytes - most_bytes
            return ModelTooLarge(
                f"{model_of(owner)} can never fit: it needs {mib(needed)} or more ({owner}"
                f" {mib(growth)}), and the limit for all models is {mib(self.capacity_bytes)}."
                " Raise --device-memory-utilization, or serve a smaller model."
            )
        held = ", ".join(f"{name} {mib(size)}" for name, size in self._by_owner().items())
        return MemoryBudgetExceeded(
            f"{owner} needs {mib(growth)}, but {mib(self.available_bytes)} of"
            f" {mib(self.capacity_bytes)} are free (reserved: {held or 'nothing'})."
            " Raise --device-memory-utilization, or serve fewer or smaller models."
        )


def model_of(owner: str) -> str:
    """Return the model of an owner's name, `model/purpose`."""
    return owner.rpartition("/")[0] or owner


def mib(num_bytes: int) -> str:
    """Format bytes as MiB."""
    return f"{num_bytes / 2**20:.1f} MiB"

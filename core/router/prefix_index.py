"""An index of the prompt prefixes that replicas probably hold, from the requests sent to them.

Owns the index: a bit mask of replicas for each key. Like the replicas' caches, it evicts the least
recently used prefixes when it holds more tokens than all caches together. Knows nothing of load.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.router.request import CUTS

_LEVEL_BITS = 4
_LEVEL = (1 << _LEVEL_BITS) - 1
_SPANS = tuple(
    cut - before for before, cut in zip((0, *CUTS), CUTS, strict=False)
)  # tokens that the page run between two cuts covers


class PrefixIndex:
    """Keys with the slots of their holders: at most `max_keys` of `capacity_tokens` in total."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.capacity_tokens = 0
        self._num_tokens = 0
        self._tokens_of: dict[int, int] = {}
        # The mask of holders and the key's level in one number; the least recently used first.
        self._entries: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def holders(self, keys: Sequence[int]) -> list[int]:
        """Return masks of the slots that hold the prefixes `keys`, the shortest first."""
        masks = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            masks.append(entry >> _LEVEL_BITS)
        return masks

    def add(self, keys: Sequence[int], slot: int) -> None:
        """Record that the replica of `slot` holds these prefixes."""
        bit = 1 << (slot + _LEVEL_BITS)
        # The longest first: useless without the shorter ones, it should be evicted earlier.
        for level in range(len(keys) - 1, -1, -1):
            entry = self._entries.pop(keys[level], level)
            if not entry & bit:
                entry |= bit
                self._num_tokens += _SPANS[level]
                self._tokens_of[slot] = self._tokens_of.get(slot, 0) + _SPANS[level]
            self._entries[keys[level]] = entry
        while self._entries and self._is_over():
            self._forget_oldest()

    def forget(self, slot: int) -> None:
        """Remove the tokens of the replica of `slot`, which is gone.

        Its bits remain until their keys are evicted; a slot is not reused before `clear`.
        """
        self._num_tokens -= self._tokens_of.pop(slot, 0)

    def clear(self) -> None:
        """Forget all prefixes and slots."""
        self._entries.clear()
        self._tokens_of.clear()
        self._num_tokens = 0

    def _is_over(self) -> bool:
        return self._num_tokens > self.capacity_tokens or len(self._entries) > self.max_keys

    def _forget_oldest(self) -> None:
        entry = self._entries.pop(next(iter(self._entries)))
        span, left = _SPANS[entry & _LEVEL], entry >> _LEVEL_BITS
        while left:  # once per bit set by `add`
            bit = left & -left
            left ^= bit
            slot = bit.bit_length() - 1
            if slot in self._tokens_of:
                self._num_tokens -= span
                self._tokens_of[slot] -= span

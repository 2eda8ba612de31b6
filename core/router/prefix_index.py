"""Which replicas are likely to hold which beginnings of prompts, by what was sent to them.

Owns the index: a bit for each replica beside each key. What was used least lately is forgotten
when more tokens are remembered than all replicas' caches hold together, as their caches do. Knows
nothing of load.
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
    """Keys with the slots of their holders. At most `max_keys`, of `capacity_tokens` in all."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.capacity_tokens = 0
        self._num_tokens = 0
        self._tokens_of: dict[int, int] = {}
        # The mask of holders and the key's level in one number; the least lately used come first.
        self._entries: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def holders(self, keys: Sequence[int]) -> list[int]:
        """Masks of the slots that hold the beginnings `keys`, the shortest first."""
        masks = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            masks.append(entry >> _LEVEL_BITS)
        return masks

    def add(self, keys: Sequence[int], slot: int) -> None:
        """The replica of `slot` holds these beginnings from now on."""
        bit = 1 << (slot + _LEVEL_BITS)
        # The longest first: it is of no use without the shorter ones, so it should go sooner.
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
        """The replica of `slot` is gone: its tokens take no room from others'.

        Its bits go with their keys; a slot is not used again before all are forgotten.
        """
        self._num_tokens -= self._tokens_of.pop(slot, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._tokens_of.clear()
        self._num_tokens = 0

    def _is_over(self) -> bool:
        return self._num_tokens > self.capacity_tokens or len(self._entries) > self.max_keys

    def _forget_oldest(self) -> None:
        entry = self._entries.pop(next(iter(self._entries)))
        span, left = _SPANS[entry & _LEVEL], entry >> _LEVEL_BITS
        while left:  # as often as bits were set by `add`
            bit = left & -left
            left ^= bit
            slot = bit.bit_length() - 1
            if slot in self._tokens_of:
                self._num_tokens -= span
                self._tokens_of[slot] -= span

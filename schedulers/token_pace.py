"""How many prompt tokens fit into a short step.

Owns the estimate, learned from the steps there were. Whoever else uses the device waits for a step
to end: that is why a prompt is cut by time, and not by a number of tokens alone, which are a moment
on one device and a second on another.
"""

from __future__ import annotations

import sys

_FIRST_TOKENS = 128
"""Of the first prompt, before anything is known."""
_LEAST_TOKENS = 32
"""Fewer would read all weights for next to nothing, and tell little."""
_GAIN = 0.3


class ChunkPace:
    """Bounds the prompt tokens of a step so that it takes about `max_step_s`; 0: no bound."""

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._token_s = 0.0

    @property
    def max_tokens(self) -> int:
        """The most prompt tokens the next step should have."""
        if not self._max_step_s:
            return sys.maxsize
        if not self._token_s:
            return _FIRST_TOKENS
        return max(_LEAST_TOKENS, int(self._max_step_s / self._token_s))

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """Learn from a step of so many prompt tokens, among others'."""
        if num_tokens < _LEAST_TOKENS or elapsed_s <= 0:
            return
        token_s = elapsed_s / num_tokens
        gain = _GAIN if self._token_s else 1.0
        self._token_s += gain * (token_s - self._token_s)

"""When a model of speech has lost its way: it does not end, or repeats itself.

Owns the search for cycles and the verdict. Knows nothing of models: it sees tokens, which may be
anything hashable.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

SpeechEnd = Literal["stop", "length", "loop"]


class Loop(NamedTuple):
    """The last `num_tokens` tokens repeat themselves every `period` tokens."""

    period: int
    num_tokens: int


class LoopDetector:
    """Finds exact cycles at the end of a stream of tokens, in time linear in its length.

    Each time a quarter of a window has come in, the Z function (Gusfield, 1997) of the window read
    backwards gives for every period how far the stream's end repeats itself. The answer depends on
    the tokens alone, not on how they were pushed. A token may be anything hashable: a
    frame of several codebooks is a tuple.

    A repetition of less than `least_tokens` is no loop: a pause repeats the token of silence. A
    cycle is at most `longest_period` tokens, and has come at least `num_repeats` times.
    """

    def __init__(
        self, *, least_tokens: int, num_repeats: int = 4, longest_period: int = 64
    ) -> None:
        if least_tokens < 2 or num_repeats < 2 or longest_period < 1:
            raise ValueError("a loop is at least two tokens, twice the same, of a period of one")
        self.least_tokens = least_tokens
        self.num_repeats = num_repeats
        self.longest_period = longest_period
        size = max(least_tokens, num_repeats * longest_period)
        self._recent: deque[Hashable] = deque(maxlen=size)
        self._stride = max(1, size // 4)
        self._num_until_check = self._stride

    def push(self, token: Hashable) -> Loop | None:
        """Take one token; returns the loop that the stream is in, when it is looked for."""
        self._recent.append(token)
        self._num_until_check -= 1
        if self._num_until_check:
            return None
        self._num_until_check = self._stride
        return self.find()

    def find(self) -> Loop | None:
        """The loop of the shortest period at the end of what was pushed."""
        repeated = z_function(list(reversed(self._recent)))
        for period in range(1, min(self.longest_period + 1, len(repeated))):
            num_tokens = period + repeated[period]
            if num_tokens >= max(self.least_tokens, self.num_repeats * period):
                return Loop(period, num_tokens)
        return None


def z_function(items: Sequence[object]) -> list[int]:
    """For each position, how many items from there on equal the sequence's beginning."""
    lengths = [len(items)] + [0] * (len(items) - 1) if items else []
    left = right = 0
    for at in range(1, len(items)):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < len(items) and items[length] == items[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths


class RunawayGuard:
    """Ends one utterance whose engine does not: after `max_tokens`, or in a loop."""

    def __init__(self, *, max_tokens: int, tokens_per_s: float, least_loop_s: float = 3.0) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens taken in, up to the one that ended the utterance."""
        self.loop: Loop | None = None
        self.finish_reason: SpeechEnd | None = None
        self._detector = LoopDetector(least_tokens=max(2, math.ceil(least_loop_s * tokens_per_s)))

    def push(self, tokens: Iterable[Hashable]) -> SpeechEnd | None:
        """Take what the engine sampled; returns why to end, from then on always the same."""
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.num_tokens += 1
            self.loop = self._detector.push(token)
            if self.loop is not None:
                self.finish_reason = "loop"
            elif self.num_tokens >= self.max_tokens:
                self.finish_reason = "length"
        return self.finish_reason

    def stop(self) -> SpeechEnd:
        """The engine ended by itself: that is the reason, unless it was ended before."""
        self.finish_reason = self.finish_reason or "stop"
        return self.finish_reason

    @property
    def num_sound_tokens(self) -> int:
        """Tokens worth playing: all, or up to the end of a loop's first cycle."""
        if self.loop is None:
            return self.num_tokens
        return self.num_tokens - self.loop.num_tokens + self.loop.period

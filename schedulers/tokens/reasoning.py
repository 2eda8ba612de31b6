"""A row's reasoning: whether it is reasoning, and what comes when its budget is spent.

Owns the count. A row goes on before it is known what it has sampled, so `num_free` says for how
many tokens nothing can be prescribed yet. Knows no text: reasoning lies between tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from msgspec import structs

from triptych.core.engine_api.tokens import ReasoningRules, TokenRequest


class ReasoningCounter:
    """Follows one row's tokens, as they become known.

    `vocab_size` tokens have a bit in its masks (see `core.engine_api.plan.TokenRow`).
    """

    def __init__(self, rules: ReasoningRules, request: TokenRequest, vocab_size: int) -> None:
        self._rules = rules
        self._vocab_size = vocab_size
        self._left = sys.maxsize if rules.max_tokens is None else rules.max_tokens
        closing = {*rules.closes, *rules.ending}
        # A row must be able to end its reasoning, even with a token that ends an answer.
        self._held_ids = tuple(
            each for each in request.sampling.stop_token_ids if each not in closing
        )
        self.sampling = structs.replace(request.sampling, stop_token_ids=self._held_ids)
        """The row's, for a runner, which holds stop tokens off while an answer is short."""
        self._has_form = bool(request.grammar)
        self._recent: tuple[int, ...] = ()
        self._num_forced = 0
        self._may_open = not rules.open_at_start
        self.is_open = rules.open_at_start

    @property
    def holds_form(self) -> bool:
        """Whether the row's grammar is yet to begin."""
        return self._has_form and self.is_open and not self._may_open

    @property
    def is_unanswered(self) -> bool:
        """Whether an answer is still due: what is sampled now ends reasoning at most."""
        return self.holds_form or self._is_spent

    @property
    def num_free(self) -> int:
        """How many tokens will be sampled before one can be prescribed, whatever they are."""
        if self.holds_form:
            return 0  # the next one may be prescribed by the grammar
        if self.is_open:
            return self._left
        if not self._may_open:
            return sys.maxsize
        return len(self._rules.opens) - len(self._recent) + self._left

    def mask(self) -> bytes:
        """Which tokens may be sampled now that all before are known; empty for any."""
        if self._is_spent:
            ending = self._rules.ending[self._num_forced : self._num_forced + 1]
            return _mask(ending, self._vocab_size, is_inverted=False)
        if self.holds_form:  # an answer must not end before it has its form
            return _mask(self._held_ids, self._vocab_size, is_inverted=True)
        return b""

    def take(self, token_ids: Iterable[int]) -> None:
        """The row has sampled these, too."""
        for token_id in token_ids:
            if self._is_spent:
                self._num_forced += 1
                if self._num_forced == len(self._rules.ending):
                    self._close()
            elif not self.is_open:
                self._look_for_opening(token_id)
            elif token_id in self._rules.closes:
                self._close()
            else:
                self._left -= 1

    @property
    def _is_spent(self) -> bool:
        return self.is_open and self._left <= 0

    def _close(self) -> None:
        self.is_open, self._num_forced, self._recent = False, 0, ()
        self._may_open = self._rules.reopen

    def _look_for_opening(self, token_id: int) -> None:
        if not self._may_open or (not self._recent and token_id in self._rules.blanks):
            return
        opens = self._rules.opens
        seen = (*self._recent, token_id)
        while seen and seen != opens[: len(seen)]:
            seen = seen[1:] if self._rules.reopen else ()
            self._may_open = self._rules.reopen
        self._recent = seen
        if seen == opens:
            self._recent, self.is_open = (), True


@lru_cache(maxsize=64)
def _mask(token_ids: tuple[int, ...], vocab_size: int, *, is_inverted: bool) -> bytes:
    """A mask of `token_ids`, or of all others."""
    bits = np.full(-(-vocab_size // 32) * 32, is_inverted, np.uint8)
    bits[list(token_ids)] = not is_inverted
    return np.packbits(bits, bitorder="little").tobytes()

"""A row's reasoning: whether it is reasoning, and the tokens that end it at its budget.

Owns the count of reasoning tokens. A row's next step is booked before its sampled token is known,
so `num_unconstrained` is the number of tokens that no mask can concern yet. Knows no text:
reasoning is delimited by tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile

import numpy as np
from msgspec import structs

from triptych.core.engine_api.tokens import ReasoningRules, TokenRequest


class ReasoningCounter:
    """Follows one row's tokens as they become known.

    `vocab_size` tokens have a bit in its masks (see `core.engine_api.plan.TokenRow`).
    """

    def __init__(self, rules: ReasoningRules, request: TokenRequest, vocab_size: int) -> None:
        self._rules = rules
        self._vocab_size = vocab_size
        self._left = sys.maxsize if rules.max_tokens is None else rules.max_tokens
        closing = {*rules.closes, *rules.ending}
        # A row must be able to end its reasoning, even with a token that ends an answer.
        self._stop_ids = tuple(
            each for each in request.sampling.stop_token_ids if each not in closing
        )
        self.sampling = structs.replace(request.sampling, stop_token_ids=self._stop_ids)
        """The row's parameters for a runner, which masks stop tokens while an answer is short."""
        self.is_relaxed = False
        """Whether drafts of its reasoning count by a relaxed rule."""
        self._ends = {*rules.closes, *self._stop_ids}
        self._has_grammar = bool(request.grammar)
        self._recent: tuple[int, ...] = ()
        self._num_forced = 0
        self._may_open = not rules.open_at_start
        self.is_open = rules.open_at_start

    @property
    def delays_grammar(self) -> bool:
        """Whether the row's grammar starts only after the reasoning."""
        return self._has_grammar and self.is_open and not self._may_open

    @property
    def is_unanswered(self) -> bool:
        """Whether the answer has not begun: a token sampled now can only end the reasoning."""
        return self.delays_grammar or self._is_exhausted

    @property
    def num_unconstrained(self) -> int:
        """How many tokens are sampled, whatever they are, before a mask can apply."""
        if self.delays_grammar:
            return 0  # the grammar may constrain the next one
        if self.is_open:
            return self._left
        if not self._may_open:
            return sys.maxsize
        return len(self._rules.opens) - len(self._recent) + self._left

    @property
    def num_draftable(self) -> int:
        """How many tokens can be sampled in one step, if the `drafts` among them are `cut`."""
        return self._left if self.delays_grammar else self.num_unconstrained

    def cut(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The first drafts: none after which another mask than the present one applies."""
        if not self.delays_grammar:
            return drafts
        return tuple(takewhile(lambda each: each not in self._ends, drafts))

    def num_relaxed(self, drafts: Sequence[int]) -> int:
        """How many of the first drafts count by a relaxed rule: none that ends the reasoning."""
        if not (self.is_relaxed and self.is_open):
            return 0
        return sum(1 for _ in takewhile(lambda each: each not in self._ends, drafts))

    def mask(self) -> bytes:
        """The mask of the next token, once all tokens before are known; empty for any token."""
        if self._is_exhausted:
            ending = self._rules.ending[self._num_forced : self._num_forced + 1]
            return _mask(ending, self._vocab_size, is_inverted=False)
        if self.delays_grammar:  # an answer must not end before its grammar starts
            return _mask(self._stop_ids, self._vocab_size, is_inverted=True)
        return b""

    def take(self, token_ids: Iterable[int]) -> None:
        """Add tokens that the row has sampled."""
        for token_id in token_ids:
            if self._is_exhausted:
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
    def _is_exhausted(self) -> bool:
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
    """A mask of `token_ids`, or of all other tokens."""
    bits = np.full(-(-vocab_size // 32) * 32, is_inverted, np.uint8)
    bits[list(token_ids)] = not is_inverted
    return np.packbits(bits, bitorder="little").tobytes()

"""Draft tokens of a row from its own text (prompt lookup decoding).

Owns the search for an earlier occurrence of a row's last tokens, whose continuation is the draft.
`draft_pace` decides the length of drafts. Knows no steps.

The method is that of Saxena (2023, "Prompt Lookup Decoding"); a draft that is not accepted costs
time and never changes a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from triptych.schedulers.tokens.draft_pace import DraftPace, Price, no_price

_NUM_PLACES = 16
"""Occurrences of an n-gram that are compared, the latest ones."""
_MAX_INDEXED, _LEAST_INDEXED = 4096, 64
"""Tokens that are indexed at once, of all rows, which takes a few milliseconds: all requests wait
meanwhile; and those of a row among many, more than a step adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRule:
    """The last `min_match` to `max_match` tokens are searched; drafts have `max_drafts` at most."""

    min_match: int
    max_match: int
    max_drafts: int


class PromptLookup:
    """The known tokens of one row, indexed by their n-grams of the shortest match."""

    def __init__(self, rule: LookupRule) -> None:
        self._rule = rule
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0
        self._pace = DraftPace()

    @property
    def num_tokens(self) -> int:
        """The length of the text."""
        return len(self._tokens)

    def take(self, token_ids: Iterable[int], num_rows: int = 1) -> None:
        """Extend the text. A long one is indexed during several steps, without drafts.

        `num_rows` share these steps, and what is indexed after each.
        """
        num_before = len(self._tokens)
        self._tokens += token_ids
        share = max(_LEAST_INDEXED, _MAX_INDEXED // num_rows)
        self._index(min(len(self._tokens), self._num_indexed + share))
        if num_before:
            self._pace.go_on(len(self._tokens) - num_before)

    def _index(self, end: int) -> None:
        """Note the places of all n-grams up to `end`."""
        tokens, size = self._tokens, self._rule.min_match
        for place in range(max(self._num_indexed + 1, size), end + 1):
            places = self._places.setdefault(tuple(tokens[place - size : place]), [])
            places.append(place)
            if len(places) > _NUM_PLACES + 1:  # the last one is the end itself
                del places[0]
        self._num_indexed = end

    def find(
        self, most: int, num_rows: int = 1, price: Price = no_price, room: float = math.inf
    ) -> tuple[int, ...]:
        """A guess of the next tokens, `most` at most, where it is worth its price (`DraftPace`).

        The continuation of the longest match; of equal ones that with the most frequent next token,
        and then the latest. One that reaches the end of the text goes on with itself: it repeats.
        """
        most = min(most, self._rule.max_drafts)
        if most <= 0 or self._num_indexed < len(self._tokens):
            return ()
        place, match = self._longest_match()
        if not place:
            return ()
        tokens, drafts = self._tokens, list[int]()
        num_drafts = self._pace.choose(most, match, num_rows, price, room)
        for at in range(place, place + num_drafts):
            drafts.append(tokens[at] if at < len(tokens) else drafts[at - len(tokens)])
        return tuple(drafts)

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        """Learn how many tokens of the last guess were right."""
        self._pace.settle(num_drafts, num_accepted)

    def cut(self, price: float) -> float:
        """Count this price of the last guess, which was cut; returns what is saved."""
        return self._pace.cut(price)

    def _longest_match(self) -> tuple[int, int]:
        """The place after the earlier occurrence of the longest suffix, and the suffix's length.

        0 and 0 without one.
        """
        tokens, size = self._tokens, self._rule.min_match
        places = self._places.get(tuple(tokens[-size:]), []) if len(tokens) > size else []
        best, longest = list[int](), 0
        for place in reversed(places[:-1]):
            length = self._match_length(place)
            if length > longest:
                best, longest = [place], length
            elif length == longest:
                best.append(place)
        if len(best) < 2:
            return (best[0] if best else 0), longest
        counts = Counter([tokens[place] for place in best])
        return max(best, key=lambda place: counts[tokens[place]]), longest

    def _match_length(self, place: int) -> int:
        """How many tokens before `place` equal the last ones."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(self._rule.max_match, place)
        length = self._rule.min_match
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

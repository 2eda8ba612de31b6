"""Draft tokens of a row from its own text (prompt lookup decoding).

Owns the search for an earlier occurrence of a row's last tokens, whose continuation is the draft,
and the length of drafts, which follows from how many of them were accepted. Knows no steps.

The method is that of Saxena (2023, "Prompt Lookup Decoding"); a draft that is not accepted costs
time and never changes a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_NUM_PLACES = 8
"""Occurrences of an n-gram that are compared, the latest ones."""
_FIRST_LENGTH = 3
_MEMORY = 0.25
"""The weight of the latest draft in the mean of accepted tokens."""
_LEAST_ACCEPTED = 0.6
"""The mean of accepted tokens below which verifying costs more than it saves."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 256


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
        self._length = min(_FIRST_LENGTH, rule.max_drafts)
        self._mean_accepted = 1.0
        self._pause, self._next_pause = 0, _FIRST_PAUSE

    @property
    def num_tokens(self) -> int:
        """The length of the text."""
        return len(self._tokens)

    def take(self, token_ids: Iterable[int]) -> None:
        """Extend the text."""
        tokens, size = self._tokens, self._rule.min_match
        for token_id in token_ids:
            tokens.append(token_id)
            self._pause -= self._pause > 0
            if len(tokens) >= size:
                places = self._places.setdefault(tuple(tokens[-size:]), [])
                places.append(len(tokens))
                if len(places) > _NUM_PLACES + 1:  # the last one is the end itself
                    del places[0]

    def find(self, most: int) -> tuple[int, ...]:
        """A guess of the next tokens, `most` at most; none while guesses fail.

        The continuation of the longest match, the latest of equal ones. One that reaches the end of
        the text goes on with itself: it repeats.
        """
        num_drafts = min(self._length, most)
        if self._pause or num_drafts <= 0:
            return ()
        tokens, drafts = self._tokens, list[int]()
        place = self._longest_match()
        if place:
            for at in range(place, place + num_drafts):
                drafts.append(tokens[at] if at < len(tokens) else drafts[at - len(tokens)])
        return tuple(drafts)

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        """Adapt the length of drafts to a verified one, or pause."""
        self._mean_accepted += _MEMORY * (num_accepted - self._mean_accepted)
        if num_accepted == num_drafts:
            self._length = min(2 * self._length + 1, self._rule.max_drafts)
        else:
            self._length = max(2, num_accepted + 1)
        if self._mean_accepted >= _LEAST_ACCEPTED:
            self._next_pause = _FIRST_PAUSE if num_accepted > 1 else self._next_pause
            return
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        self._mean_accepted = 1.0

    def _longest_match(self) -> int:
        """The place after the earlier occurrence of the longest suffix; 0 without one."""
        tokens, size = self._tokens, self._rule.min_match
        places = self._places.get(tuple(tokens[-size:]), []) if len(tokens) > size else []
        best, longest = 0, 0
        for place in reversed(places[:-1]):
            length = self._match_length(place)
            if length > longest:
                best, longest = place, length
        return best

    def _match_length(self, place: int) -> int:
        """How many tokens before `place` equal the last ones."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(self._rule.max_match, place)
        length = self._rule.min_match
        while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

"""Drafts from a row's own text."""

from __future__ import annotations

import pytest

from triptych.schedulers.tokens.prompt_lookup import LookupRule, PromptLookup

RULE = LookupRule(min_match=2, max_match=4, max_drafts=7)


def lookup(*token_ids: int, rule: LookupRule = RULE) -> PromptLookup:
    found = PromptLookup(rule)
    found.take(token_ids)
    assert found.num_tokens == len(token_ids)
    return found


def test_drafts_are_what_followed_the_same_tokens() -> None:
    assert lookup(1, 2, 3, 4, 5, 9, 1, 2).find(3) == (3, 4, 5)


def test_of_equal_matches_the_most_frequent_continuation_counts() -> None:
    assert lookup(5, 1, 2, 30, 6, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2).find(1) == (30,)


def test_the_longest_match_counts_and_the_latest_of_equal_ones() -> None:
    assert lookup(7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2).find(1) == (30,)
    assert lookup(8, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2).find(1) == (40,)


def test_a_draft_that_reaches_the_end_repeats() -> None:
    assert lookup(1, 2, 1, 2, 1, 2).find(3) == (1, 2, 1)


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 2), (1, 2, 3, 4), (1, 1, 2, 2, 3, 3)])
def test_new_text_has_no_drafts(token_ids: tuple[int, ...]) -> None:
    assert lookup(*token_ids).find(8) == ()


@pytest.mark.parametrize("most", [0, -1])
def test_without_room_there_are_no_drafts(most: int) -> None:
    assert lookup(1, 2, 3, 1, 2).find(most) == ()


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_long_text_is_indexed_during_several_steps(num_rows: int) -> None:
    found = PromptLookup(RULE)
    found.take((*range(5000 // num_rows), *range(3)), num_rows)
    assert found.find(2) == ()
    found.take((3,), num_rows)
    assert found.find(2) == (4, 5)


def test_drafts_are_as_long_as_they_are_worth() -> None:
    found = lookup(*range(20), *range(3))
    assert len(found.find(99)) == RULE.max_drafts
    assert found.find(99, 1, lambda num_rows, num_drafts: num_drafts) == ()
    assert len(found.find(99, 1, lambda num_rows, num_drafts: 0.5 * num_drafts)) == 1


def test_drafts_that_fail_end_and_come_back() -> None:
    found = lookup(*[1, 2] * 4)

    def tokens_until_a_draft() -> int:
        num_tokens = 0
        while not found.find(9, 1, lambda num_rows, num_drafts: 0.4):
            found.take((1, 2))
            num_tokens += 2
        found.settle(1, 0)
        return num_tokens

    gaps = [tokens_until_a_draft() for _ in range(6)]
    assert gaps[0] == 0
    assert all(gap >= 16 for gap in gaps[2:])


def test_old_places_are_forgotten() -> None:
    found = lookup(*[1, 2, 3] * 500)
    assert max(len(places) for places in found._places.values()) <= 17
    assert found.find(3) == (1, 2, 3)

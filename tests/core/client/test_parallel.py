"""Requests at once: results in order, errors as results, an early end."""

from __future__ import annotations

import threading

import pytest

from triptych.core.client.parallel import in_order
from triptych.core.errors import InvalidRequest


def test_results_are_in_order_whichever_is_done_first() -> None:
    second = threading.Event()

    def answer(number: int) -> int:
        if number == 0:
            assert second.wait(10)
        second.set()
        return number * 2

    assert list(in_order(answer, [0, 1, 2], 2)) == [0, 2, 4]
    assert list(in_order(answer, [], 2)) == []


def test_an_error_is_a_result_and_a_bug_is_raised() -> None:
    def answer(number: int) -> int:
        if number == 1:
            raise InvalidRequest("no")
        return 1 // number

    first, error, *_ = in_order(answer, [2, 1, 3], 1)
    assert first == 0
    assert isinstance(error, InvalidRequest)
    with pytest.raises(ZeroDivisionError):
        list(in_order(answer, [0], 1))


def test_leaving_early_starts_no_further_ones() -> None:
    asked: list[int] = []
    go_on = threading.Event()

    def answer(number: int) -> int:
        asked.append(number)
        if number:
            assert go_on.wait(10)
        return number

    found = in_order(answer, range(100), 1)
    assert next(found) == 0
    found.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "triptych-request":
            thread.join(10)
    assert len(asked) <= 2

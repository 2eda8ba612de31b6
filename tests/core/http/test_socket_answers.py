"""Answers of a WebSocket as requests of their own: how they end, and under which id."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.core.errors import Overloaded
from triptych.core.http.recent_requests import RecentRequests
from triptych.core.http.socket_answers import SocketAnswers

CONTEXT: Any = SimpleNamespace(call_id="c.ahead_1", principal=SimpleNamespace(owner="o"))


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 200), (Overloaded("Later."), 503), (ValueError(), 500), (GeneratorExit(), 499)],
)
def test_an_answer_has_the_status_of_its_end(error: BaseException | None, status: int) -> None:
    recent = RecentRequests()
    answers = SocketAnswers(recent, None, "/v1/x")

    def work() -> Generator[None]:
        with answers.follow(CONTEXT, "ahead_1"):
            yield
            if error is not None:
                raise error

    running = work()
    next(running)
    answers.rename(CONTEXT, "ahead_1", "resp_1")
    found = recent.find("resp_1", "o")
    assert found is not None
    assert (found.call_id, found.status) == ("c.ahead_1", None)
    with pytest.raises(type(error or StopIteration())):
        next(running)
    assert (found.route, found.status) == ("/v1/x", status)
    assert recent.find("ahead_1", "o") is None

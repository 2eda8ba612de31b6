"""The table from exceptions to answers."""

from __future__ import annotations

import json

import pytest

from triptych.core.errors import (
    BY_CODE,
    Draining,
    InternalError,
    InvalidRequest,
    JobFailed,
    MethodNotAllowed,
    ModelTooLarge,
    NotFound,
    Overloaded,
    RateLimited,
    SetupError,
    TriptychError,
    Unauthorized,
    Unavailable,
)
from triptych.core.http.errors import error_response, to_public


@pytest.mark.parametrize("cls", sorted(BY_CODE.values(), key=lambda cls: cls.code))
def test_every_error_of_the_tree_has_an_answer(cls: type[TriptychError]) -> None:
    response = error_response(cls("say what to do", param="field"), "req-1")
    detail = json.loads(bytes(response.body))["error"]
    assert set(detail) == {"message", "type", "param", "code", "request_id"}
    assert detail["request_id"] == "req-1"
    if issubclass(cls, SetupError) and cls is not ModelTooLarge:
        assert response.status_code == 503
        assert "say what to do" not in detail["message"]
    else:
        assert response.status_code == cls.status
        assert (detail["message"], detail["code"]) == ("say what to do", cls.code)
        assert detail["param"] == "field"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (NotFound("x"), "invalid_request_error"),
        (MethodNotAllowed("x"), "invalid_request_error"),
        (RateLimited("x"), "rate_limit_error"),
        (Overloaded("x"), "server_error"),
        (JobFailed("x"), "server_error"),
    ],
)
def test_types_are_those_of_openai(error: TriptychError, kind: str) -> None:
    assert json.loads(bytes(error_response(error, "r").body))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (Overloaded("x", retry_after_s=2.1), "3"),
        (RateLimited("x", retry_after_s=0.01), "1"),
        (Draining("x"), "1"),
        (Unavailable("x"), "1"),
        (InvalidRequest("x"), None),
    ],
)
def test_retry_after_is_whole_seconds_rounded_up(error: TriptychError, after: str | None) -> None:
    assert error_response(error, "r").headers.get("retry-after") == after


def test_unknown_exceptions_reveal_nothing() -> None:
    public = to_public(RuntimeError("/etc/passwd at 0x7f00deadbeef"))
    assert isinstance(public, InternalError)
    assert "passwd" not in public.message


def test_unauthorized_names_the_scheme() -> None:
    assert error_response(Unauthorized("x"), "r").headers["www-authenticate"] == "Bearer"


def test_a_model_that_never_fits_is_said_so_and_not_asked_again() -> None:
    response = error_response(ModelTooLarge("Raise --device-memory-utilization."), "r")
    assert response.status_code == 503
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers

"""Errors cross process boundaries as what they are."""

import pytest

from triptych.core.errors import (
    BY_CODE,
    InternalError,
    InvalidRequest,
    TriptychError,
    UnknownModel,
    from_info,
    to_info,
)


@pytest.mark.parametrize("cls", [*BY_CODE.values(), InvalidRequest, InternalError])
def test_an_error_comes_back_as_what_it_was(cls: type[TriptychError]) -> None:
    error = from_info(to_info(cls("No.", param="seed", retry_after_s=2.0)))
    assert type(error) is cls
    assert (error.message, error.param, error.retry_after_s) == ("No.", "seed", 2.0)


def test_what_is_outside_the_tree_says_nothing_of_itself() -> None:
    error = from_info(to_info(KeyError("/secret/path")))
    assert type(error) is InternalError
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x", "There is no image model 'x' here. Image models: none."),
        ("", "There is no image model here. Image models: none."),
    ],
)
def test_an_unknown_model_is_named_where_it_has_a_name(name: str, message: str) -> None:
    assert UnknownModel.among([], name, "image model").message == message

"""Errors of libraries become sentences about the file, without fragments of Python."""

from __future__ import annotations

import pytest

from triptych.core.errors import WeightsError
from triptych.core.weights.library_errors import library_errors

NO_WORDS = "It fails: a value that its class reads is missing, or of another kind."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TypeError("'NoneType' object is not subscriptable"), NO_WORDS),
        (IndexError("list index out of range"), NO_WORDS),
        (StopIteration(), NO_WORDS),
        (AssertionError(), NO_WORDS),
        (KeyError("full_attention"), "It fails: full_attention is missing."),
        (KeyError("Missing keys: rope_theta."), "It fails: Missing keys: rope_theta."),
        (ImportError("X requires timm."), "A package is missing: X requires timm."),
        (ValueError("heads do not fit.\nmore"), "It fails: heads do not fit."),
    ],
)
def test_the_cause_is_said_in_words(error: Exception, said: str) -> None:
    with pytest.raises(WeightsError) as caught, library_errors("It fails"):
        raise error
    assert caught.value.message == said

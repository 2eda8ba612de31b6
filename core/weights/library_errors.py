"""Turning errors of libraries that read untrusted configurations or tensors into `WeightsError`.

Owns the list of exception types. Knows no library except by its exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from triptych.core.errors import TriptychError, WeightsError
from triptych.core.weights.layout import brief

_UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn the errors of library code that reads a file's data into `WeightsError`."""
    try:
        yield
    except TriptychError:
        raise
    except _UNFIT as error:
        raise WeightsError(f"{problem}: {brief(error)}.") from error

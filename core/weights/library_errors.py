"""Turning errors of libraries that read untrusted configurations or tensors into `WeightsError`.

Owns the list of exception types. Knows no library except by its exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from triptych.core.errors import TriptychError, WeightsError
from triptych.core.weights.layout import brief

_OF_PYTHON = (AttributeError, IndexError, StopIteration, TypeError)
"""Errors whose messages say what code does, and nothing about the file."""
_MOST_CHARACTERS = 120
_UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    StopIteration,
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
    except ImportError as error:
        raise WeightsError(f"A package is missing: {brief(error)}.") from error
    except _UNFIT as error:
        raise WeightsError(f"{problem}: {_cause(error)}.") from error


def _cause(error: BaseException) -> str:
    """The cause, in words that say something to the owner of the file."""
    if isinstance(error, _OF_PYTHON) or not str(error).strip():
        return "a value that its class reads is missing, or of another kind"
    if isinstance(error, KeyError) and error.args:
        key = str(error.args[0])
        return key.rstrip(". ") if " " in key else f"{key} is missing"
    if isinstance(error, StrictDataclassError):  # its first line names a validator
        said = str(error).splitlines()[-1].partition(": ")[2]
        return said[:_MOST_CHARACTERS].rstrip(". ") or brief(error)
    return brief(error)

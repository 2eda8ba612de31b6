"""Library code that reads a stranger's configuration or tensors, and what it raises.

Owns which exceptions those are, and their one line. Knows no library but by what it raises.
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
    LookupError,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@contextmanager
def unfit(problem: str) -> Iterator[None]:
    """Around library code that reads a file's data: what it raises is a `WeightsError`."""
    try:
        yield
    except TriptychError:
        raise
    except _UNFIT as error:
        raise WeightsError(f"{problem}: {brief(error)}.") from error

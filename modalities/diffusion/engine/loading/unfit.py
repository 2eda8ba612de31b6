"""What library code raises about configurations and names that it cannot make sense of.

They are data, but libraries compute with them: any of these means unfit data, never a mistake here.
"""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

UNFIT = (
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


def brief(error: Exception) -> str:
    """What it says in one short line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120].rstrip(".")

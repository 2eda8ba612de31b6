"""The context length of a model, from its configuration.

Owns the names of the field, which differ between families, and the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triptych.core.errors import WeightsError

_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
_DEFAULT = 2048


def context_length(get: Callable[[str], Any]) -> int:
    """The length in a configuration; `get` returns a field's value, or `None`.

    Raises `WeightsError` if the value is not a length.
    """
    for name in _FIELDS:
        if length := get(name):
            if not isinstance(length, int | float) or length < 1:
                raise WeightsError(f"config.json: {name} must be a number above 0.")
            return int(length)
    return _DEFAULT

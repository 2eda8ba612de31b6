"""Validators that apps share: FastAPI makes one of each field of each route, for each app again.

That is most of the time of making an app, which many tests do.
"""

from __future__ import annotations

from typing import Any

from fastapi._compat.v2 import ModelField

_make = ModelField.__post_init__
_made: dict[tuple[Any, str], Any] = {}


def share_validators() -> None:
    """Let all apps of this process have the same validators of the same fields."""
    ModelField.__post_init__ = _share  # type: ignore[method-assign]


def _share(field: ModelField) -> None:
    described = *field.field_info.__repr_args__(), field.config
    key = field.field_info.annotation, repr(described)
    if key not in _made:
        _make(field)
        _made[key] = field._type_adapter
    field._type_adapter = _made[key]

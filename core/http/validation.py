"""Errors of bodies that do not validate, with the known name that an unknown field resembles.

Owns the lookup of the fields at a place of a body's type. `core.http.errors` owns the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from triptych.core.http.errors import NEAR
from triptych.core.http.fields import Strict, models_of
from triptych.core.process.suggestions import nearest


def invalid_body(kind: Any, error: ValidationError) -> RequestValidationError:
    """Return FastAPI's error for a body of type `kind` that pydantic refuses."""
    found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    return RequestValidationError(with_near_name(kind, found))


def with_near_name(kind: Any, errors: Sequence[Any]) -> list[Any]:
    """Return FastAPI's errors of a body of type `kind`; the first gets the name that it resembles.

    Only the first is shown, and a body may have many unknown fields.
    """
    first, *others = errors
    near = _near_name(kind, first)
    return [{**first, "ctx": {NEAR: near}} if near else first, *others]


def _near_name(kind: Any, error: Mapping[str, Any]) -> str | None:
    if error["type"] != "extra_forbidden":
        return None
    *place, name = error["loc"][1:]
    return nearest(str(name), _names(_models_at(kind, place)))


def _models_at(kind: Any, place: Iterable[int | str]) -> list[type[Strict]]:
    """Return the models that the object at `place` may have; indices and union tags are skipped."""
    models = list(models_of(kind))
    for part in place:
        fields = (model.model_fields.get(part) for model in models if isinstance(part, str))
        if inner := [model for field in fields if field for model in _models_in(field)]:
            models = inner
    return models


def _models_in(field: FieldInfo) -> Iterable[type[Strict]]:
    return models_of(field.annotation)


def _names(models: Iterable[type[Strict]]) -> list[str]:
    fields = [(name, field) for model in models for name, field in model.model_fields.items()]
    return [field.alias or name for name, field in fields]

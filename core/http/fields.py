"""Base models and types of the fields of JSON bodies.

Owns the strict model, bounded texts and names, and the fields without support: inert ones are
accepted because they cannot change an answer, hints are ignored and reported in a response header,
others are refused by name with the alternative. Any other name is an unknown field. Knows no route.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from triptych.core import limits
from triptych.core.errors import UnsupportedOption

_ABOUT = {"title", "description", "default"}
"""Keywords of a JSON schema that describe a field and not its values."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Text = Annotated[str, StringConstraints(max_length=limits.MAX_TEXT_CHARS)]
InputText = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_TEXT_CHARS)]
JsonObject = Annotated[dict[str, Any], Field(json_schema_extra={"format": "json-object"})]
"""Any JSON object; the limit of the body bounds its size."""
JsonValue = Annotated[Any, Field(json_schema_extra={"format": "json-value"})]
"""Any JSON value that is not read; the limit of the body bounds its size."""
Place = Annotated[int, Field(ge=0, le=2**31 - 1)]
Label = Annotated[str, StringConstraints(max_length=limits.MAX_METADATA_VALUE_CHARS)]

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=limits.MAX_METADATA_KEY_CHARS)],
        Annotated[str, StringConstraints(max_length=limits.MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=limits.MAX_METADATA_ENTRIES),
]


class Strict(BaseModel):
    """A request or a part of it: no coercion, no unknown fields, no non-finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class NullIsAbsent(Strict):
    """A JSON body whose optional fields may be null, as some clients send for missing fields.

    Null is a value of the fields in `nullable`.
    """

    nullable: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        absent = cls.model_fields.keys() - set(cls.nullable)
        return {
            name: field for name, field in value.items() if field is not None or name not in absent
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Allow null in the JSON schema."""
        schema = handler.resolve_ref_schema(handler(core))
        required = schema.get("required", ())
        for name, field in schema["properties"].items():
            types = {part.get("type") for part in field.get("anyOf", ())}
            if name not in required and "null" not in types:
                about = {word: field.pop(word) for word in _ABOUT & field.keys()}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}
        return schema


class TakesModel(Strict):
    """A request that may name a model.

    `tasks` are the names of the possible tasks (`core.http.models.Task`), in order of preference.
    """

    tasks: ClassVar[tuple[str, ...]]


class NamesModel(TakesModel):
    """A request to a model. If it names none, the route inserts the only model for the task."""

    model: Name = Field(description="Default: the only model for this task.")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Make `model` optional in the JSON schema."""
        schema = handler.resolve_ref_schema(super().__get_pydantic_json_schema__(core, handler))
        required = [name for name in schema.get("required", ()) if name != "model"]
        schema.pop("required", None)
        return schema | ({"required": required} if required else {})


def models_of(kind: Any) -> Iterator[type[Strict]]:
    """Yield the pydantic models of a body's type, which may be a union."""
    if isinstance(kind, type) and issubclass(kind, Strict):
        yield kind
    else:
        for part in get_args(kind):
            yield from models_of(part)


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """The only value of an ignored field that is refused, with the alternative `instead`."""

    value: Any
    instead: str


class IgnoresHints(Strict):
    """An object whose fields in the table `ignored` are accepted with any value.

    The table gives the reason why a field changes nothing that a client could rely on. `ignored_in`
    finds the fields for the response header. A value in `refused_values` would change the answer.
    """

    ignored: ClassVar[Mapping[str, str]] = MappingProxyType({})
    refused_values: ClassVar[Mapping[str, RefusedValue]] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: Any) -> Any:
        if not isinstance(value, dict) or cls.ignored.keys().isdisjoint(value):
            return value
        for name, refused in cls.refused_values.items():
            if value.get(name) is not None and value[name] == refused.value:
                shown = json.dumps(refused.value)
                raise UnsupportedOption(
                    f"{name} {shown} is not offered: {refused.instead}", param=name
                )
        return {name: field for name, field in value.items() if name not in cls.ignored}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the ignored fields to the JSON schema."""
        schema = handler.resolve_ref_schema(super().__get_pydantic_json_schema__(core, handler))
        for name, reason in sorted(cls.ignored.items()):
            about = f"Ignored, and reported in a header: {reason}."
            schema["properties"][name] = {"description": about, "format": "json-value"}
        return schema


def ignored_in(model: Any, value: Any, place: str = "") -> Iterator[str]:
    """Yield the paths of ignored fields in a parsed body, except null ones.

    `model` is the body's type; no member of a union ignores a field that another one reads. The
    objects of a list share a path, which is repeated.
    """
    for kind in models_of(model) if isinstance(value, dict) else ():
        if issubclass(kind, IgnoresHints):
            yield from (place + name for name in kind.ignored if value.get(name) is not None)
        for name, inner in _fields_with_hints(kind):
            part = value.get(name)
            for each in part if isinstance(part, list) else (part,):
                yield from ignored_in(inner, each, f"{place}{name}.")


@cache
def _fields_with_hints(model: type[Strict]) -> Sequence[tuple[str, type[IgnoresHints]]]:
    """The fields of `model` for objects, or lists of objects, with ignored fields."""
    return [
        (field.alias or name, kind)
        for name, field in model.model_fields.items()
        for kind in models_of(field.annotation)
        if issubclass(kind, IgnoresHints)
    ]


_CACHED = "shared prompt prefixes are always cached"
_PLACED = "the operator sets the placement of models"
_DUMPED = "clients add it to earlier answers that they send back"
_LABEL = "a label that does not affect answers"
_SUMMARY = "reasoning is returned in full"
INERT: Mapping[str, str] = MappingProxyType(
    {
        "cache_control": _CACHED,
        "cache_prompt": "answers are the same with and without a cache",
        "chat_id": _LABEL,
        "data": _DUMPED,
        "diagnostics": "there are no cache diagnostics; it does not affect answers",
        "eager_input_streaming": "arguments are always streamed as they are generated",
        "expires_at": _DUMPED,
        "f16_kv": _PLACED,
        "generate_summary": _SUMMARY,
        "include_obfuscation": "chunks are not padded",
        "index": _DUMPED,
        "insecure": "no model is fetched for a request",
        "low_vram": _PLACED,
        "main_gpu": _PLACED,
        "max_tool_calls": "it limits tools that a server runs",
        "metadata": _LABEL,
        "mirostat_eta": "it belongs to mirostat, which is off",
        "mirostat_tau": "it belongs to mirostat, which is off",
        "moderation": "nothing is moderated here",
        "num_batch": _PLACED,
        "num_gpu": _PLACED,
        "num_keep": "prompts are never truncated",
        "num_thread": _PLACED,
        "numa": _PLACED,
        "parsed": _DUMPED,
        "parsed_arguments": _DUMPED,
        "phase": _LABEL,
        "prompt_cache_breakpoint": _CACHED,
        "prompt_cache_key": _CACHED,
        "prompt_cache_retention": _CACHED,
        "provider_specific_fields": "details of a provider about an earlier answer",
        "safety_identifier": _LABEL,
        "service_tier": "there is one tier; priority orders requests",
        "store": "only /v1/responses stores answers",
        "summary": _SUMMARY,
        "use_mlock": _PLACED,
        "use_mmap": _PLACED,
        "user": _LABEL,
    }
)
"""Fields that are accepted without effect, and why that cannot mislead a client."""


def inert(name: str) -> Any:
    """Return the pydantic field of a name in `INERT`."""
    return Field(default=None, description=f"Accepted without effect: {INERT[name]}.")


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A refused field: the alternative `instead`, and the `neutral` values that change nothing."""

    instead: str
    neutral: tuple[Any, ...] = ()


def type_of(value: Any) -> str:
    """Return the `type` of a JSON object or of its parsed model; empty without one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else ""


def unknown_type(value: Any, known: str) -> str:
    """Return the `type` of an object, quoted for an error, unless it is missing or `known`."""
    kind = type_of(value)
    return f"{kind[:40]!a}" if kind not in ("", known) else ""


def without_refused(fields: Any, table: Mapping[str, RefusedField]) -> Any:
    """Drop the fields of `table`. Raises `UnsupportedOption` unless their values are neutral."""
    if not isinstance(fields, dict):
        return fields
    for name in sorted(table.keys() & fields.keys()):
        value = fields[name]
        if value is not None and value not in table[name].neutral:
            raise UnsupportedOption(f"{name} is not offered: {table[name].instead}", param=name)
    return {name: value for name, value in fields.items() if name not in table}


class Refusing(Strict):
    """An object whose fields in the table `refused` are refused unless their values are neutral."""

    refused: ClassVar[Mapping[str, RefusedField]] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_fields(cls, value: Any) -> Any:
        return without_refused(value, cls.refused)

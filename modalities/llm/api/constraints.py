"""The fields of a request that prescribe the form of its answer.

Owns their names, those of OpenAI and of vLLM, and that there is one of them at most. What a form
means is `core.grammar`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)

from triptych.core.errors import InvalidRequest, RequestError
from triptych.core.grammar.schemas import check_formats
from triptych.core.grammar.source import ANY_OBJECT, Constraint, ConstraintKind
from triptych.core.http.fields import Name, RefusedField, Strict, Text, without_refused
from triptych.core.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

_Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
_Choice = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
_Choices = Annotated[list[_Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
JsonSchema = Annotated[dict[str, Any], Field(json_schema_extra={"format": "json-schema"})]
_SchemaOrText = Annotated[
    Annotated[JsonSchema, Tag(":schema")] | Annotated[_Pattern, Tag(":text")],
    Discriminator(lambda value: ":text" if isinstance(value, str) else ":schema"),
]

_REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        "disable_additional_properties": RefusedField(
            "say additionalProperties false in the schema.", (False,)
        ),
        "disable_any_whitespace": RefusedField("white space is bounded, and JSON's.", (False,)),
        "disable_fallback": RefusedField("there is nothing to fall back to.", (True, False)),
        "structural_tag": RefusedField("use grammar."),
        "whitespace_pattern": RefusedField("white space is bounded, and JSON's."),
    }
)


class JsonSchemaFormat(Strict):
    """A schema with a name, which says nothing to the model."""

    name: Name
    description: Text | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None,
        description="Schemas are enforced either way; with it unknown formats are refused, too.",
    )

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.strict and self.schema_ is not None:
            check_formats(self.schema_, "response_format")
        return self


class AnswerFormat(Strict):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "json_schema goes with the type of that name, and with no other.",
                param="response_format",
            )
        return self


class StructuredOutputs(Strict):
    """vLLM's way to ask for a form."""

    json_: _SchemaOrText | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: _Pattern | None = Field(default=None, description="A regular expression.")
    choice: _Choices | None = Field(default=None, description="One of these texts.")
    grammar: _Pattern | None = Field(default=None, description="Lark's notation, or GBNF.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_options(cls, value: Any) -> Any:
        return without_refused(value, _REFUSED)


class ConstraintFields(Strict):
    """The form of an answer; one of these fields at most asks for any."""

    response_format: AnswerFormat | None = Field(
        default=None, description="JSON of any kind, or by a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="A JSON schema, a regular expression, choices or a grammar."
    )
    guided_json: _SchemaOrText | None = Field(
        default=None, description="As structured_outputs.json."
    )
    guided_regex: _Pattern | None = Field(default=None, description="As structured_outputs.regex.")
    guided_choice: _Choices | None = Field(
        default=None, description="As structured_outputs.choice."
    )
    guided_grammar: _Pattern | None = Field(
        default=None, description="As structured_outputs.grammar."
    )

    @model_validator(mode="after")
    def _check_constraint(self) -> Self:
        asked = [param for param, _, _ in self._asked()]
        if len(asked) > 1:
            first, second = asked[0], asked[1]
            forms = f"{first} and {second} are" if first != second else f"{first} asks for"
            raise InvalidRequest(f"An answer has one form: {forms} two.", param=second)
        return self

    def constraint(self) -> Constraint | None:
        """The form that is asked for, if there is one. Takes as long as it takes to write it."""
        for param, kind, value in self._asked():
            text = value if isinstance(value, str) else json.dumps(value)
            return Constraint(kind, text, param)
        return None

    def _asked(self) -> Iterator[tuple[str, ConstraintKind, Any]]:
        """Each form with the field it is in."""
        form, vllm = self.response_format, self.structured_outputs or StructuredOutputs()
        if form is not None and form.type != "text":
            schema = None if form.json_schema is None else form.json_schema.schema_
            yield "response_format", "json_schema", ANY_OBJECT if schema is None else schema
        if vllm.json_object:
            yield "structured_outputs", "json_schema", ANY_OBJECT
        asked: tuple[tuple[ConstraintKind, Any, Any], ...] = (
            ("json_schema", vllm.json_, self.guided_json),
            ("regex", vllm.regex, self.guided_regex),
            ("choice", vllm.choice, self.guided_choice),
            ("grammar", vllm.grammar, self.guided_grammar),
        )
        for kind, named, guided in asked:
            if named is not None:
                yield "structured_outputs", kind, named
            if guided is not None:
                name = "json" if kind == "json_schema" else kind
                yield f"guided_{name}", kind, guided


def constraint_of(options: Mapping[str, Any]) -> Constraint | None:
    """The form that a call from Python asks for. Raises `InvalidRequest`."""
    given = {name: options[name] for name in ConstraintFields.model_fields if name in options}
    try:
        return ConstraintFields.model_validate(given).constraint()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if isinstance(own := first.get("ctx", {}).get("error"), RequestError):
            raise own from error
        param = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{param}: {first['msg']}.", param=param) from error
    except (TypeError, RecursionError) as error:
        raise InvalidRequest(f"A schema holds plain JSON alone: {error}.") from error

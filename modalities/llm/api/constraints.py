"""The fields of a request that constrain the format of its answer.

Owns their names in OpenAI, vLLM, SGLang and llama.cpp, and the rule that a request has at most one.
The constraints themselves are `core.grammar`'s.
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
from triptych.core.grammar.constraint import ANY_OBJECT, Constraint, ConstraintKind
from triptych.core.grammar.formats import check_formats
from triptych.core.http.fields import Name, RefusedField, Refusing, Strict, Text
from triptych.core.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

_Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
_Choice = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
_Choices = Annotated[list[_Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
_PatternOrNone = Annotated[str, StringConstraints(max_length=MAX_GRAMMAR_BYTES)]
"""Clients that fill in defaults send an empty text for no constraint."""
JsonSchema = Annotated[dict[str, Any], Field(json_schema_extra={"format": "json-schema"})]
_SchemaOrText = Annotated[
    Annotated[JsonSchema, Tag(":schema")] | Annotated[_Pattern, Tag(":text")],
    Discriminator(lambda value: ":text" if isinstance(value, str) else ":schema"),
]

_REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        "disable_additional_properties": RefusedField(
            "set additionalProperties to false in the schema.", (False,)
        ),
        "disable_any_whitespace": RefusedField("leave it out; white space is limited.", (False,)),
        "disable_fallback": RefusedField("leave it out; there is no fallback.", (True, False)),
        "structural_tag": RefusedField("use grammar."),
        "whitespace_pattern": RefusedField("leave it out; white space is limited."),
    }
)


class JsonSchemaFormat(Strict):
    """A schema with an optional name, which the model does not see."""

    name: Name | None = None
    description: Text | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None,
        description="Schemas are always enforced; with `true`, unknown formats are refused.",
    )

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.strict and self.schema_ is not None:
            check_formats(self.schema_, "response_format")
        return self


class AnswerFormat(Strict):
    """OpenAI's `response_format`; llama.cpp and Together put `schema` at this level."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonSchema | None = Field(
        default=None, alias="schema", description="Of json_object, or in place of json_schema."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        given = (self.json_schema is not None) + (self.schema_ is not None)
        allowed = {"text": (0,), "json_object": (0, 1), "json_schema": (1,)}[self.type]
        if given not in allowed or (self.json_schema is not None and self.type != "json_schema"):
            raise InvalidRequest(
                "The type json_schema goes with json_schema or schema, json_object with schema or"
                " with neither, text with neither.",
                param="response_format",
            )
        return self

    @property
    def requested_schema(self) -> Mapping[str, Any] | str:
        """The schema of a JSON answer, as an object or as text."""
        named = None if self.json_schema is None else self.json_schema.schema_
        given = self.schema_ if named is None else named
        return ANY_OBJECT if given is None else given


class StructuredOutputs(Refusing):
    """Constraints as vLLM has them."""

    refused = _REFUSED

    json_: _SchemaOrText | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: _Pattern | None = Field(default=None, description="A regular expression.")
    choice: _Choices | None = Field(default=None, description="One of these texts.")
    grammar: _Pattern | None = Field(default=None, description="Lark's notation, or GBNF.")


class ConstraintFields(Strict):
    """The fields that constrain the format of an answer; at most one of them is set."""

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
    json_schema: _SchemaOrText | None = Field(
        default=None, description="As structured_outputs.json, its name in llama.cpp."
    )
    grammar: _PatternOrNone | None = Field(
        default=None, description="As structured_outputs.grammar, its name in llama.cpp."
    )
    ebnf: _PatternOrNone | None = Field(
        default=None, description="As structured_outputs.grammar, its name in SGLang."
    )
    regex: _PatternOrNone | None = Field(
        default=None, description="As structured_outputs.regex, its name in SGLang."
    )

    @model_validator(mode="after")
    def _check_constraint(self) -> Self:
        asked = [param for param, _, _ in self._constraints()]
        if len(asked) > 1:
            first, second = asked[0], asked[1]
            fields = f"{first} and {second} are" if first != second else f"{first} has"
            raise InvalidRequest(f"An answer has one format: {fields} two.", param=second)
        return self

    def constraint(self) -> Constraint | None:
        """The requested constraint, if any. Takes as long as serializing its schema."""
        for param, kind, value in self._constraints():
            text = value if isinstance(value, str) else json.dumps(value)
            return Constraint(kind, text, param)
        return None

    def _constraints(self) -> Iterator[tuple[str, ConstraintKind, Any]]:
        """Each requested constraint with the field it comes from."""
        form, vllm = self.response_format, self.structured_outputs or StructuredOutputs()
        if form is not None and form.type != "text":
            yield "response_format", "json_schema", form.requested_schema
        if vllm.json_object:
            yield "structured_outputs", "json_schema", ANY_OBJECT
        asked: tuple[tuple[str, ConstraintKind, Any], ...] = (
            ("structured_outputs", "json_schema", vllm.json_),
            ("structured_outputs", "regex", vllm.regex),
            ("structured_outputs", "choice", vllm.choice),
            ("structured_outputs", "grammar", vllm.grammar),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("json_schema", "json_schema", self.json_schema),
            ("regex", "regex", self.regex or None),
            ("grammar", "grammar", self.grammar or None),
            ("ebnf", "grammar", self.ebnf or None),
        )
        yield from (each for each in asked if each[2] is not None)


def constraint_of(options: Mapping[str, Any]) -> Constraint | None:
    """The constraint that a call from Python asks for. Raises `InvalidRequest`."""
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
        raise InvalidRequest(f"A schema must be plain JSON: {error}.") from error

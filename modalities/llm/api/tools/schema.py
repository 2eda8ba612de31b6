"""Tools and calls as the OpenAI API writes them.

Owns the values that each field may have. Knows no route and no format of a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.grammar.formats import check_formats
from triptych.core.http.fields import (
    JsonValue,
    Name,
    Place,
    Strict,
    Text,
    inert,
    type_of,
    unknown_type,
)
from triptych.modalities.llm.api.constraints import JsonSchema
from triptych.modalities.llm.api.tools.json_scanner import MAX_DEPTH
from triptych.modalities.llm.api.tools.json_text import load_json
from triptych.modalities.llm.api.tools.pieces import ToolSchemas

MAX_TOOL_NAME_CHARS = 128
ToolName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=MAX_TOOL_NAME_CHARS)
]


def _as_object(arguments: str) -> dict[str, Any]:
    """The arguments as an object, which templates take.

    Incomplete arguments of an answer that was cut off become an object that contains the text.
    """
    value = load_json(arguments or "{}")
    is_object = isinstance(value, dict) and _is_shallow(value)
    return value if is_object else {"arguments": arguments}


def _is_shallow(value: Any) -> bool:
    """Whether a value is nested at most as deeply as parsed calls."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        parts = (each.values() if isinstance(each, dict) else each for each in layer)
        layer = [entry for part in parts for entry in part if isinstance(entry, dict | list)]
        if not layer:
            return True
    return False


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise InvalidRequest("The parameters of a tool are a schema of type object.", param="tools")
    return schema


class FunctionSchema(Strict):
    """A function that the model may call. `parameters` are a JSON schema of an object.

    Without any it takes no arguments.
    """

    name: ToolName
    description: Text | None = None
    parameters: Annotated[JsonSchema, AfterValidator(_of_object)] | None = None
    strict: bool | None = Field(
        default=None,
        description="Enforce the schema also under `auto`; forced calls always follow it.",
    )

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.strict and self.parameters is not None:
            check_formats(self.parameters, "tools")
        return self


class Tool(Strict):
    """A tool, which is a function of the client."""

    type: Literal["function"]
    function: FunctionSchema

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        if kind := unknown_type(value, "function"):
            raise UnsupportedOption(
                f"Tools are functions of the client, not {kind}.", param="tools"
            )
        return value

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it, without absent fields."""
        given = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        known = {name: value for name, value in given.items() if value is not None}
        return {"type": self.type, "function": known}


class FunctionChoice(Strict):
    """The name of a function."""

    name: ToolName


class NamedTool(Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedFunctions(Strict):
    """A subset of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool], Field(min_length=1, max_length=limits.MAX_TOOLS, fail_fast=True)
    ]


class ToolSubset(Strict):
    """The choice of a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _choice_kind(value: Any) -> str:
    if isinstance(value, str):
        return ":word"
    return ":allowed" if type_of(value) == "allowed_tools" else ":named"


Tools = Annotated[
    list[Tool],
    Field(max_length=limits.MAX_TOOLS, fail_fast=True, description="Tools that may be called."),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")]
    | Annotated[NamedTool, Tag(":named")]
    | Annotated[ToolSubset, Tag(":allowed")],
    Discriminator(_choice_kind),
]


class CalledFunction(Strict):
    """A function and the arguments of its call, as JSON text or the beginning of it."""

    name: ToolName
    arguments: Text
    parsed_arguments: JsonValue = inert("parsed_arguments")


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Place | None = inert("index")

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: with arguments as an object."""
        arguments = _as_object(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools that an answer may call, or must if `is_required`; once, if `has_one_call`."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    has_one_call: bool = False

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        choice: str | NamedTool | ToolSubset | None,
        *,
        is_parallel: bool = True,
    ) -> ToolSet:
        """The tool set of a request. Raises `InvalidRequest` for a choice of an unknown tool."""
        if len({tool.function.name for tool in tools}) < len(tools):
            raise InvalidRequest("Two tools have one name.", param="tools")
        if isinstance(choice, NamedTool):
            return cls(_among(tools, [choice]), is_required=True, has_one_call=True)
        if isinstance(choice, ToolSubset):
            allowed = choice.allowed_tools
            return cls(_among(tools, allowed.tools), allowed.mode == "required", not is_parallel)
        if choice == "required" and not tools:
            raise InvalidRequest(
                "tool_choice requires tools, and there are none.", param="tool_choice"
            )
        if choice == "none":
            return cls()
        return cls(tuple(tools), choice == "required", not is_parallel)

    @property
    def schemas(self) -> ToolSchemas:
        """The schemas of the tools' parameters, by name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.for_template() for tool in self.tools]


def _among(tools: Sequence[Tool], chosen: Sequence[NamedTool]) -> tuple[Tool, ...]:
    """The chosen tools, in the order of `tools`."""
    names = {choice.function.name for choice in chosen}
    if absent := sorted(names - {tool.function.name for tool in tools}):
        raise InvalidRequest(
            f"tool_choice names {absent[0]}, which is not among the tools.", param="tool_choice"
        )
    return tuple(tool for tool in tools if tool.function.name in names)

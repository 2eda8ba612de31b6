"""Tools and calls as the OpenAI API writes them.

Owns what each of their fields may be. Knows no route and no format of a family.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import Name, Strict, Text
from triptych.modalities.llm.api.constraints import JsonSchema
from triptych.modalities.llm.api.tools.pieces import ToolSchemas

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)]


def _as_object(arguments: str) -> str:
    try:
        is_object = isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise InvalidRequest(
            "The arguments of a tool call are a JSON object, as text.", param="messages"
        )
    return arguments or "{}"


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
        description="Follow the schema under `auto`, too; calls that are forced always do.",
    )


class Tool(Strict):
    """A tool: a function of the client's."""

    type: Literal["function"]
    function: FunctionSchema

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedOption(
                f"Tools are functions of the client's; {kind[:40]!a} is none.", param="tools"
            )
        return value

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it: without what was not given."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionChoice(Strict):
    """The name of a function."""

    name: ToolName


class NamedTool(Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionChoice


def _choice_kind(value: Any) -> str:
    return ":word" if isinstance(value, str) else ":named"


Tools = Annotated[
    list[Tool],
    Field(max_length=limits.MAX_TOOLS, fail_fast=True, description="What may be called."),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")]
    | Annotated[NamedTool, Tag(":named")],
    Discriminator(_choice_kind),
]


class CalledFunction(Strict):
    """A function and the arguments it was called with, which are JSON text."""

    name: ToolName
    arguments: Annotated[Text, AfterValidator(_as_object)]


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: with arguments as an object."""
        arguments = json.loads(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that an answer may call, or must if that `is_required`; once, if `has_one_call`."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    has_one_call: bool = False

    @classmethod
    def of(
        cls, tools: Sequence[Tool], choice: str | NamedTool | None, *, is_parallel: bool = True
    ) -> Offer:
        """What a request offers. Raises `InvalidRequest` for a choice that is not there."""
        named = {tool.function.name: tool for tool in tools}
        if len(named) < len(tools):
            raise InvalidRequest("Two tools have one name.", param="tools")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in named:
                raise InvalidRequest(
                    f"tool_choice names {name}, which is not among the tools.", param="tool_choice"
                )
            return cls((named[name],), is_required=True, has_one_call=True)
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

"""The tools of the Responses API, and which of them an answer may or must call.

Owns the values of their fields, the flat list of functions in namespaces for the model, and the
omission of tools that a server would run itself. Knows no route.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import NullIsAbsent, Text, type_of, unknown_type, without_refused
from triptych.modalities.llm.api.constraints import JsonSchema
from triptych.modalities.llm.api.responses import unsupported
from triptych.modalities.llm.api.responses.names import FunctionPlace
from triptych.modalities.llm.api.tools.schema import ToolName

HostedKind: TypeAlias = Literal[
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
_HOSTED = frozenset(get_args(HostedKind))


class FunctionTool(NullIsAbsent):
    """A function of the client. `parameters` are a JSON schema of an object."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = Field(
        default=None,
        description="Enforce the schema also under `auto`; forced calls always follow it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        if kind := unknown_type(value, "function"):
            raise UnsupportedOption(
                f"A tool of type {kind} is not offered: {unsupported.instead_of_tool()}",
                param="tools",
            )
        return without_refused(value, unsupported.TOOL)

    def shown(self) -> dict[str, Any]:
        """The tool as an answer repeats it."""
        return self.model_dump()

    def for_chat(self, place: FunctionPlace, about: str) -> dict[str, Any]:
        """The tool as chat has it, with the namespace's description, `about`, in front."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        function["name"] = place.model_name
        if about:
            function["description"] = "\n\n".join(filter(None, (about, self.description)))
        return {"type": "function", "function": function}


class NamespaceTool(NullIsAbsent):
    """Functions of the client under a common name, as MCP servers have them."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: Annotated[
        list[FunctionTool], Field(min_length=1, max_length=limits.MAX_TOOLS, fail_fast=True)
    ]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for tool in self.tools:
            FunctionPlace(tool.name, self.name).check("tools")
        return self

    def shown(self) -> dict[str, Any]:
        """The tool as an answer repeats it."""
        own = self.model_dump(exclude_none=True, exclude={"tools"})
        return {**own, "tools": [tool.shown() for tool in self.tools]}


class HostedTool(NullIsAbsent):
    """A tool that a server would run; this server runs none and omits it from the prompt."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"format": "json-object"})

    type: HostedKind


def _tool_kind(value: Any) -> str:
    kind = type_of(value)
    if kind in _HOSTED:
        return ":hosted"
    return ":namespace" if kind == "namespace" else ":function"


ResponseTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag(":function")]
    | Annotated[NamespaceTool, Tag(":namespace")]
    | Annotated[HostedTool, Tag(":hosted")],
    Discriminator(_tool_kind),
]


def _few_functions(tools: list[ResponseTool]) -> list[ResponseTool]:
    inner = (len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for tool in tools)
    if (num_tools := sum(inner)) > limits.MAX_TOOLS:
        raise InvalidRequest(
            f"A request has at most {limits.MAX_TOOLS} tools, those of namespaces included; these"
            f" are {num_tools}.",
            param="tools",
        )
    return tools


ResponseTools: TypeAlias = Annotated[
    list[ResponseTool],
    Field(max_length=limits.MAX_TOOLS, fail_fast=True),
    AfterValidator(_few_functions),
]


class FunctionName(NullIsAbsent):
    """A function by its name, with or without its namespace as a prefix."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(NullIsAbsent):
    """The tools that may or must be called for this answer."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[FunctionName], Field(min_length=1, max_length=limits.MAX_TOOLS, fail_fast=True)
    ]


def _choice_kind(value: Any) -> str:
    if isinstance(value, str):
        return ":word"
    kind = type_of(value)
    if kind not in ("", "function", "allowed_tools"):
        raise UnsupportedOption(
            f"A tool of type {kind[:40]!a} is not offered: {unsupported.instead_of_tool()}",
            param="tool_choice",
        )
    return ":allowed" if kind == "allowed_tools" else ":named"


ToolChoices: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(":word")]
    | Annotated[AllowedTools, Tag(":allowed")]
    | Annotated[FunctionName, Tag(":named")],
    Discriminator(_choice_kind),
]


class ResponseToolSet:
    """The functions of a request, in namespaces or not, and their translation to chat."""

    def __init__(self, tools: Sequence[FunctionTool | NamespaceTool | HostedTool]) -> None:
        self._tools = tools
        self.places = {place.model_name: place for place, _, _ in self._functions()}
        """The client's place of each function, by the name that the model uses."""

    @property
    def left_out(self) -> list[str]:
        """The tools that are omitted from the prompt, as fields of the request."""
        kinds = dict.fromkeys(tool.type for tool in self._tools if isinstance(tool, HostedTool))
        return [f"tools.{kind}" for kind in kinds]

    def shown(self) -> list[dict[str, Any]]:
        """The usable tools, as an answer repeats them."""
        return [tool.shown() for tool in self._tools if not isinstance(tool, HostedTool)]

    def for_chat(self, choice: ToolChoices | None) -> dict[str, Any]:
        """The fields of a chat request. Raises `InvalidRequest` for a choice of an unknown tool."""
        tools = [tool.for_chat(place, about) for place, tool, about in self._functions()]
        chosen: Any = choice
        if isinstance(choice, AllowedTools):
            names = {self._found(each.name) for each in choice.tools}
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            chosen = choice.mode
        elif isinstance(choice, FunctionName):
            chosen = {"type": "function", "function": {"name": self._found(choice.name)}}
        return {"tools": tools or None, "tool_choice": chosen}

    def _functions(self) -> Iterator[tuple[FunctionPlace, FunctionTool, str]]:
        """Each function, with the description of its namespace for the first in it."""
        for tool in self._tools:
            if isinstance(tool, FunctionTool):
                yield FunctionPlace(tool.name), tool, ""
            elif isinstance(tool, NamespaceTool):
                about = tool.description or ""
                for function in tool.tools:
                    yield FunctionPlace(function.name, tool.name), function, about
                    about = ""

    def _found(self, name: str) -> str:
        """The chosen function's name for the model. Raises `InvalidRequest` unless there is one."""
        if name in self.places:
            return name
        meant = [known for known, place in self.places.items() if place.name == name]
        if len(meant) == 1:
            return meant[0]
        reason = (
            f"which several namespaces have: name one of {', '.join(meant)[:200]}"
            if meant
            else "which is not among the tools"
        )
        raise InvalidRequest(f"tool_choice names {name}, {reason}.", param="tool_choice")

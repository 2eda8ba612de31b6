"""Fields of the Responses API that are not offered.

Owns their names, the neutral values (which are accepted) and the alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from triptych.core.http.fields import RefusedField
from triptych.modalities.llm.api import unsupported

Table: TypeAlias = Mapping[str, RefusedField]

_CLIENT_S = "tools are functions of the client; declare one of type 'function' for it."
_BEFORE = "moderate before and after the call."

REQUEST: Table = MappingProxyType(
    {
        **unsupported.COMMON,
        "access_programs": RefusedField("leave it out; nothing here depends on it."),
        "background_options": RefusedField(
            "leave it out; a background response begins as soon as possible.",
            ({}, {"completion_window": "soonest"}),
        ),
        "context_management": RefusedField("shorten the input; nothing is cut silently.", ([],)),
        "enable_response_messages": RefusedField(
            "post messages to /apply-template to see the prompt.", (False,)
        ),
        "image": RefusedField(
            "leave it out; use detail of input_image.",
            ({"context_compression": "auto"}, {"context_compression": "disabled"}),
        ),
        "moderation": RefusedField(_BEFORE),
        "previous_input_messages": RefusedField("send them in input.", ([],)),
        "prompt": RefusedField("send instructions and input; no prompts are stored."),
        "prompt_cache_options": RefusedField("equal prompt beginnings are cached automatically."),
        "truncation": RefusedField("shorten the input; nothing is cut silently.", ("disabled",)),
    }
)
IGNORED: Mapping[str, str] = MappingProxyType(
    {**unsupported.IGNORED, "client_metadata": "a label, which no answer depends on"}
)
REASONING: Table = MappingProxyType(
    {
        "context": RefusedField("leave it out; the chat template decides.", ("auto",)),
        "mode": RefusedField("there is one mode.", ("standard",)),
    }
)
TEXT: Table = MappingProxyType(
    {"verbosity": RefusedField("ask for it in the instructions.", ("medium",))}
)
TOOL: Table = MappingProxyType(
    {
        "allowed_callers": RefusedField("only the model calls tools.", (["direct"],)),
        "defer_loading": RefusedField("the prompt describes all tools.", (False,)),
        "output_schema": RefusedField("put it into the description."),
    }
)
CALL: Table = MappingProxyType(
    {
        "async": RefusedField("a call ends the answer.", (False,)),
        "caller": RefusedField("only the model calls tools.", ({"type": "direct"},)),
    }
)


def instead_of_tool() -> str:
    """The alternative to a tool that a server would run."""
    return _CLIENT_S


def instead_of_part(kind: str) -> str:
    """The alternative to a part of a message."""
    if kind == "input_file":
        return "put the text of a file into 'input_text'."
    if kind == "input_audio":
        return "send sound to /v1/audio/transcriptions."
    return "a message takes 'input_text', 'output_text', 'refusal' and 'input_image'; leave it out."


def instead_of_item(kind: str) -> str:
    """The alternative to an item."""
    if kind.endswith(("_call", "_call_output", "_output")) or kind.startswith("mcp_"):
        return _CLIENT_S
    return "leave it out."

"""Fields, tools and blocks of Anthropic's API that are not offered.

Owns their names, the neutral values (which are accepted) and the alternatives; and the ignored
fields, each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.http.fields import RefusedField

IN_CLIENT = "tools run in the client: describe it as a custom tool, with an input_schema."
AS_TEXT = "put its text into a text block."

BODY: Mapping[str, RefusedField] = MappingProxyType(
    {
        "billing_policy": RefusedField("nothing is billed here; leave it out."),
        "compaction": RefusedField("summarize the conversation in the client."),
        "container": RefusedField("no code runs here; leave it out."),
        "fallback_credit_token": RefusedField("no other model answers; leave it out."),
        "fallbacks": RefusedField("no other model answers; ask for one of /v1/models.", ([],)),
        "mcp_servers": RefusedField("call them in the client, as custom tools.", ([],)),
        "thread": RefusedField("send the whole conversation."),
    }
)

IGNORED: Mapping[str, str] = MappingProxyType(
    {"inference_geo": "everything runs where this server does", "speed": "there is one speed"}
)

OUTPUT: Mapping[str, RefusedField] = MappingProxyType(
    {"task_budget": RefusedField("use max_tokens.")}
)

TOOL: Mapping[str, RefusedField] = MappingProxyType(
    {
        "allowed_callers": RefusedField("only the model calls tools.", (["direct"],)),
        "defer_loading": RefusedField(
            "there is no search for tools: send all that may be called.", (False,)
        ),
        "input_examples": RefusedField("put them into the description.", ([],)),
    }
)

TEXT: Mapping[str, RefusedField] = MappingProxyType(
    {"citations": RefusedField("an answer cites nothing.", ([],))}
)

CITATIONS: Mapping[str, RefusedField] = MappingProxyType(
    {"enabled": RefusedField("an answer cites nothing.", (False,))}
)

IMAGE: Mapping[str, RefusedField] = MappingProxyType(
    {"transformations": RefusedField("images are scaled as their model needs it.", ({},))}
)

CALL: Mapping[str, RefusedField] = MappingProxyType(
    {
        "caller": RefusedField("only the model calls tools.", ({"type": "direct"},)),
        "toolset_name": RefusedField(IN_CLIENT),
    }
)

BLOCKS: Mapping[str, str] = MappingProxyType(
    {
        "browser_state": AS_TEXT,
        "compaction": "summarize the conversation in the client.",
        "container_upload": "no code runs here; send a file's content as text or image.",
        "search_result": AS_TEXT,
        "tool_reference": "there is no search for tools: send all that may be called.",
    }
)
"""Blocks with their own alternative; blocks of tools that run elsewhere share one."""
ELSEWHERE = frozenset(
    {"document", "image", "redacted_thinking", "thinking", "tool_result", "tool_use"}
)
"""Blocks that only messages may have."""


def instead_of_block(kind: str) -> str:
    """The alternative to a block of this type."""
    if kind in ELSEWHERE:
        return "only text is accepted in this place."
    is_of_tool = kind.endswith(("_tool_use", "_tool_result"))
    return BLOCKS.get(kind, IN_CLIENT if is_of_tool else "use text, image and tool_result.")

# /// script
# dependencies = ["anthropic==2.14.0"]
# ///
"""Anthropic's Python package: messages, streaming, tools, counting."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from checks import Server, run_checks, said
from tasks import (
    INSTRUCTIONS,
    MAX_TOKENS,
    PRICE_FUNCTION,
    PRICE_QUESTION,
    QUESTION,
    look_up_price,
)

TOOL: Any = {
    "name": PRICE_FUNCTION["name"],
    "description": PRICE_FUNCTION["description"],
    "input_schema": PRICE_FUNCTION["parameters"],
}


def client_of(server: Server) -> Anthropic:
    """A client for the server, whose address has no /v1 here."""
    return Anthropic(base_url=server.url, api_key=server.key)


def asking(server: Server) -> dict[str, Any]:
    """The fields of every request."""
    return {"model": server.model, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}


def message(server: Server) -> str:
    """Ask for one answer."""
    reply = client_of(server).messages.create(
        messages=[{"role": "user", "content": QUESTION}],
        system="You answer in one sentence.",
        **asking(server),
    )
    assert reply.stop_reason == "end_turn"
    assert reply.usage.output_tokens > 0
    return said(reply.content[0].text, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    with client_of(server).messages.stream(
        messages=[{"role": "user", "content": QUESTION}], **asking(server)
    ) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().content[0].text == text
    return said(text, "Paris")


def tools(server: Server) -> str:
    """A call that is required, its result, and an answer."""
    client = client_of(server)
    messages: list[Any] = [{"role": "user", "content": PRICE_QUESTION}]
    asked = {**asking(server), "tools": [TOOL], "system": INSTRUCTIONS}
    reply = client.messages.create(messages=messages, tool_choice={"type": "any"}, **asked)
    assert reply.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": look_up_price(**block.input)}
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages += [
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": results},
    ]
    answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    return said("".join(block.text for block in answer.content if block.type == "text"), "24.9")


def count_tokens(server: Server) -> str:
    """The length of a prompt."""
    counted = client_of(server).messages.count_tokens(
        model=server.model, messages=[{"role": "user", "content": QUESTION}]
    )
    assert counted.input_tokens > 0
    return f"{counted.input_tokens} tokens"


def main() -> None:
    """Try each function."""
    run_checks("anthropic", message, stream, tools, count_tokens)


if __name__ == "__main__":
    main()

# /// script
# dependencies = ["litellm==1.110.2", "mcp==2.3.0"]
# ///
"""LiteLLM: as an OpenAI-compatible and as a vLLM server, with tools and structured output."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import Server, run_checks, said
from tasks import (
    INSTRUCTIONS,
    MAX_TOKENS,
    PERSON_TEXT,
    PRICE_FUNCTION,
    PRICE_QUESTION,
    QUESTION,
    Person,
    look_up_price,
)


def asking(server: Server, provider: str = "openai") -> dict[str, Any]:
    """The fields of every request."""
    return {
        "model": f"{provider}/{server.model}",
        "api_base": server.v1,
        "api_key": server.key,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def question(text: str) -> list[Any]:
    """A conversation that begins with it."""
    return [{"role": "user", "content": text}]


def completion(server: Server) -> str:
    """Ask for one answer."""
    reply: Any = litellm.completion(messages=question(QUESTION), **asking(server))
    return said(reply.choices[0].message.content, "Paris")


def hosted_vllm(server: Server) -> str:
    """One answer, as from a vLLM server."""
    reply: Any = litellm.completion(messages=question(QUESTION), **asking(server, "hosted_vllm"))
    return said(reply.choices[0].message.content, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    parts: Any = litellm.completion(messages=question(QUESTION), stream=True, **asking(server))
    return said("".join(part.choices[0].delta.content or "" for part in parts), "Paris")


def tools(server: Server) -> str:
    """A call that is required, its result, and an answer."""
    asked = asking(server) | {"tools": [{"type": "function", "function": PRICE_FUNCTION}]}
    messages = [{"role": "system", "content": INSTRUCTIONS}, *question(PRICE_QUESTION)]
    reply: Any = litellm.completion(messages=messages, tool_choice="required", **asked)
    messages.append(reply.choices[0].message)
    for call in reply.choices[0].message.tool_calls:
        content = look_up_price(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    answer: Any = litellm.completion(messages=messages, tool_choice="none", **asked)
    return said(answer.choices[0].message.content, "24.9")


def response_format(server: Server) -> str:
    """An answer of a type."""
    reply: Any = litellm.completion(
        messages=question(PERSON_TEXT), response_format=Person, **asking(server)
    )
    content = reply.choices[0].message.content
    return said(repr(Person.model_validate_json(content)), "age=36")


def responses(server: Server) -> str:
    """The Responses API."""
    asked = asking(server)
    asked["max_output_tokens"] = asked.pop("max_tokens")
    reply: Any = litellm.responses(input=QUESTION, **asked)
    return said(str(reply.output), "Paris")


def main() -> None:
    """Try each function."""
    run_checks("litellm", completion, hosted_vllm, stream, tools, response_format, responses)


if __name__ == "__main__":
    main()

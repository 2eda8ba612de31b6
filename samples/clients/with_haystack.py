# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack: a generator, structured output, an agent with two tools."""

from __future__ import annotations

from typing import Any

from checks import Server, run_checks, said
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from tasks import (
    INSTRUCTIONS,
    MAX_STEPS,
    MAX_TOKENS,
    PERSON_TEXT,
    PRICE_QUESTION,
    QUESTION,
    Person,
    calculate,
    look_up_price,
)


def model_of(server: Server, **options: Any) -> OpenAIChatGenerator:
    """A generator on the server's model."""
    return OpenAIChatGenerator(
        api_key=Secret.from_token(server.key),
        model=server.model,
        api_base_url=server.v1,
        generation_kwargs={"temperature": 0, "max_tokens": MAX_TOKENS, **options},
    )


def chat(server: Server) -> str:
    """Ask for one answer."""
    reply = model_of(server).run([ChatMessage.from_user(QUESTION)])
    return said(reply["replies"][0].text, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    parts: list[str] = []
    model_of(server).run(
        [ChatMessage.from_user(QUESTION)],
        streaming_callback=lambda chunk: parts.append(chunk.content),
    )
    return said("".join(parts), "Paris")


def response_format(server: Server) -> str:
    """An answer of a type."""
    reply = model_of(server, response_format=Person).run([ChatMessage.from_user(PERSON_TEXT)])
    return said(repr(Person.model_validate_json(reply["replies"][0].text)), "age=36")


def agent(server: Server) -> str:
    """An agent that chooses among two tools by itself."""
    tools = [create_tool_from_function(each) for each in (calculate, look_up_price)]
    answering = Agent(
        chat_generator=model_of(server),
        tools=tools,
        system_prompt=INSTRUCTIONS,
        max_agent_steps=MAX_STEPS,
    )
    reply = answering.run(messages=[ChatMessage.from_user(PRICE_QUESTION)])
    calls = [call.tool_name for message in reply["messages"] for call in message.tool_calls]
    said(str(calls), "look_up_price")
    return said(reply["messages"][-1].text, "24.9")


def main() -> None:
    """Try each function."""
    run_checks("haystack-ai", chat, stream, response_format, agent)


if __name__ == "__main__":
    main()

# /// script
# dependencies = ["agent-framework-openai==1.17.0"]
# ///
"""Microsoft's Agent Framework, on chat and on Responses: answers, streams, tools, a schema."""

from __future__ import annotations

from typing import Any

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from checks import Server, run_checks, said
from tasks import (
    INSTRUCTIONS,
    MAX_TOKENS,
    PERSON_TEXT,
    PRICE_QUESTION,
    QUESTION,
    Person,
    calculate,
    look_up_price,
)


def chat_agent(server: Server, **options: Any) -> Agent:
    """An agent on chat completions."""
    client = OpenAIChatCompletionClient(server.model, base_url=server.v1, api_key=server.key)
    settings = {"temperature": 0, "max_tokens": MAX_TOKENS}
    return Agent(client, default_options=settings, **options)


async def run(server: Server) -> str:
    """Ask for one answer."""
    return said((await chat_agent(server).run(QUESTION)).text, "Paris")


async def stream(server: Server) -> str:
    """An answer as it is written."""
    parts = [part.text async for part in chat_agent(server).run(QUESTION, stream=True)]
    return said("".join(filter(None, parts)), "Paris")


async def agent(server: Server) -> str:
    """An agent with two tools."""
    made = chat_agent(server, instructions=INSTRUCTIONS, tools=[calculate, look_up_price])
    return said((await made.run(PRICE_QUESTION)).text, "24.9")


async def response_format(server: Server) -> str:
    """An answer that follows a schema."""
    reply = await chat_agent(server).run(PERSON_TEXT, options={"response_format": Person})
    return said(repr(reply.value), "age=36")


async def responses(server: Server) -> str:
    """The same on the Responses API."""
    client = OpenAIChatClient(server.model, base_url=server.v1, api_key=server.key)
    made = Agent(client, default_options={"temperature": 0, "max_tokens": MAX_TOKENS})
    return said((await made.run(QUESTION)).text, "Paris")


def main() -> None:
    """Try each function."""
    run_checks("agent-framework-openai", run, stream, agent, response_format, responses)


if __name__ == "__main__":
    main()

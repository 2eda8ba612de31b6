# /// script
# dependencies = ["agno==3.1.10", "openai==3.57.0"]
# ///
"""Agno: an agent without tools and with two, an answer by a schema, the Responses API."""

from __future__ import annotations

from typing import Any

from agno.agent import Agent
from agno.models.openai import OpenAILike, OpenAIResponses
from checks import Server, run_checks, said
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


def agent_of(server: Server, **options: Any) -> Agent:
    """An agent without telemetry."""
    model = OpenAILike(
        id=server.model,
        base_url=server.v1,
        api_key=server.key,
        temperature=0,
        max_tokens=MAX_TOKENS,
        supports_native_structured_outputs=True,
    )
    return Agent(**{"model": model, "telemetry": False, "tool_call_limit": MAX_STEPS, **options})


def run(server: Server) -> str:
    """Ask for one answer."""
    return said(str(agent_of(server).run(QUESTION).content), "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    parts = agent_of(server).run(QUESTION, stream=True)
    return said("".join(str(part.content or "") for part in parts), "Paris")


def agent(server: Server) -> str:
    """An agent with two tools."""
    made = agent_of(server, tools=[calculate, look_up_price], instructions=INSTRUCTIONS)
    return said(str(made.run(PRICE_QUESTION).content), "24.9")


def output_schema(server: Server) -> str:
    """An answer that follows a schema."""
    found = agent_of(server, output_schema=Person).run(PERSON_TEXT).content
    assert isinstance(found, Person)
    return said(repr(found), "age=36")


def responses(server: Server) -> str:
    """The same on the Responses API."""
    model = OpenAIResponses(
        id=server.model,
        base_url=server.v1,
        api_key=server.key,
        temperature=0,
        max_output_tokens=MAX_TOKENS,
    )
    return said(str(agent_of(server, model=model).run(QUESTION).content), "Paris")


def main() -> None:
    """Try each function."""
    run_checks("agno", run, stream, agent, output_schema, responses)


if __name__ == "__main__":
    main()

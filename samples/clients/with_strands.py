# /// script
# dependencies = ["strands-agents[openai]==1.62.0"]
# ///
"""Strands: an agent without tools and with two, and an answer by a schema."""

from __future__ import annotations

from typing import Any

from checks import Server, run_checks, said
from strands import Agent, tool
from strands.models.openai import OpenAIModel
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
    """An agent that prints nothing."""
    model = OpenAIModel(
        client_args={"base_url": server.v1, "api_key": server.key},
        model_id=server.model,
        params={"temperature": 0, "max_tokens": MAX_TOKENS},
    )
    return Agent(model=model, callback_handler=None, **options)


def run(server: Server) -> str:
    """One answer, which comes as a stream."""
    return said(str(agent_of(server)(QUESTION)), "Paris")


def agent(server: Server) -> str:
    """An agent with two tools."""
    tools = [tool(calculate), tool(look_up_price)]
    made = agent_of(server, tools=tools, system_prompt=INSTRUCTIONS)
    return said(str(made(PRICE_QUESTION, limits={"turns": MAX_STEPS})), "24.9")


def structured_output(server: Server) -> str:
    """An answer by a call that is required."""
    found = agent_of(server)(PERSON_TEXT, structured_output_model=Person).structured_output
    assert isinstance(found, Person)
    return said(repr(found), "age=36")


def main() -> None:
    """Try each function."""
    run_checks("strands-agents", run, agent, structured_output)


if __name__ == "__main__":
    main()

# /// script
# dependencies = ["crewai==1.15.30"]
# ///
"""CrewAI: an agent without tools and with two, and an answer by a schema. Telemetry is off."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from checks import Server, run_checks, said, too_small_if
from crewai import LLM, Agent
from crewai.tools import tool
from crewai.tools.tool_failure import ToolExecutionFailedError
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
    """An agent of the shop."""
    llm = LLM(
        model=f"openai/{server.model}",
        base_url=server.v1,
        api_key=server.key,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    return Agent(
        role="Assistant",
        goal="Help",
        backstory=INSTRUCTIONS,
        llm=llm,
        max_iter=MAX_STEPS,
        **options,
    )


def run(server: Server) -> str:
    """Ask for one answer."""
    return said(agent_of(server).kickoff(QUESTION).raw, "Paris")


def agent(server: Server) -> str:
    """An agent with two tools."""
    made = agent_of(server, tools=[tool(calculate), tool(look_up_price)])
    with too_small_if(ToolExecutionFailedError):
        return said(made.kickoff(PRICE_QUESTION).raw, "24.9")


def response_format(server: Server) -> str:
    """An answer that follows a schema."""
    found = agent_of(server).kickoff(PERSON_TEXT, response_format=Person).pydantic
    assert isinstance(found, Person)
    return said(repr(found), "age=36")


def main() -> None:
    """Try each function."""
    run_checks("crewai", run, agent, response_format)


if __name__ == "__main__":
    main()

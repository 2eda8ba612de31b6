# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""OpenAI's Agents SDK: on chat completions and on the Responses API, its default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from checks import Server, run_checks, said, too_small_if
from openai import AsyncOpenAI
from tasks import (
    INSTRUCTIONS,
    MAX_STEPS,
    MAX_TOKENS,
    PERSON_TEXT,
    PRICE_QUESTION,
    QUESTION,
    Answer,
    Person,
    calculate,
    look_up_price,
)


def agent_of(server: Server, kind: Any = OpenAIChatCompletionsModel, **options: Any) -> Agent[Any]:
    """An agent on the server's model."""
    client = AsyncOpenAI(base_url=server.v1, api_key=server.key)
    return Agent(
        name="assistant",
        model=kind(model=server.model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=MAX_TOKENS),
        **options,
    )


def calling_agent(server: Server, kind: Any = OpenAIChatCompletionsModel) -> Agent[Any]:
    """An agent that must call one of two tools first, and then answer in a format.

    The SDK resets the requirement after the first call. The format keeps a small model from
    calling again and again.
    """
    agent = agent_of(server, kind, instructions=INSTRUCTIONS, output_type=Answer)
    agent.tools = [function_tool(calculate), function_tool(look_up_price)]
    agent.model_settings = replace(agent.model_settings, tool_choice="required")
    return agent


def with_tools(server: Server, kind: Any) -> str:
    """An agent that chooses among two tools by itself."""
    with too_small_if(MaxTurnsExceeded):
        reply = Runner.run_sync(calling_agent(server, kind), PRICE_QUESTION, max_turns=MAX_STEPS)
    calls = [str(item.raw_item) for item in reply.new_items if isinstance(item, ToolCallItem)]
    said(str(calls), "look_up_price")
    return said(reply.final_output.answer, "24.9")


def run(server: Server) -> str:
    """Ask for one answer."""
    return said(Runner.run_sync(agent_of(server), QUESTION).final_output, "Paris")


async def stream(server: Server) -> str:
    """An answer as it is written."""
    reply = Runner.run_streamed(agent_of(server), QUESTION)
    events = [event.type async for event in reply.stream_events()]
    assert "raw_response_event" in events
    return said(reply.final_output, "Paris")


def agent(server: Server) -> str:
    """Two tools, on chat completions."""
    return with_tools(server, OpenAIChatCompletionsModel)


def output_type(server: Server) -> str:
    """An answer of a type."""
    extracting = agent_of(server, output_type=Person)
    return said(repr(Runner.run_sync(extracting, PERSON_TEXT).final_output), "age=36")


def responses(server: Server) -> str:
    """One answer through the Responses API."""
    answering = agent_of(server, OpenAIResponsesModel)
    return said(Runner.run_sync(answering, QUESTION).final_output, "Paris")


def responses_agent(server: Server) -> str:
    """Two tools, through the Responses API."""
    return with_tools(server, OpenAIResponsesModel)


def main() -> None:
    """Try each function."""
    set_tracing_disabled(True)  # traces go to OpenAI
    run_checks("openai-agents", run, stream, agent, output_type, responses, responses_agent)


if __name__ == "__main__":
    main()

# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Pydantic AI: an agent with two tools, and typed output in three ways; the Responses API."""

from __future__ import annotations

from typing import Any

from checks import Server, run_checks, said, too_small_if
from pydantic_ai import (
    Agent,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
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

SETTINGS: Any = {"temperature": 0, "max_tokens": MAX_TOKENS}


def model_of(server: Server, kind: Any = OpenAIChatModel) -> Any:
    """A chat model for the server."""
    return kind(server.model, provider=OpenAIProvider(base_url=server.v1, api_key=server.key))


def run(server: Server) -> str:
    """Ask for one answer."""
    return said(Agent(model_of(server), model_settings=SETTINGS).run_sync(QUESTION).output, "Paris")


async def stream(server: Server) -> str:
    """An answer as it is written."""
    async with Agent(model_of(server), model_settings=SETTINGS).run_stream(QUESTION) as reply:
        parts = [part async for part in reply.stream_text(delta=True)]
    return said("".join(parts), "Paris")


def agent(server: Server) -> str:
    """An agent that chooses among two tools by itself."""
    answering = Agent(
        model_of(server),
        tools=[calculate, look_up_price],
        instructions=INSTRUCTIONS,
        model_settings=SETTINGS,
    )
    with too_small_if(UsageLimitExceeded):
        reply = answering.run_sync(
            PRICE_QUESTION, usage_limits=UsageLimits(request_limit=MAX_STEPS)
        )
    said(str(reply.all_messages()), "tool_name='look_up_price'")
    return said(reply.output, "24.9")


def tool_output(server: Server) -> str:
    """Typed output by a call, the default."""
    return typed(server, ToolOutput(Person))


def native_output(server: Server) -> str:
    """Typed output by a schema."""
    return typed(server, NativeOutput(Person))


def prompted_output(server: Server) -> str:
    """Typed output by a schema in the prompt."""
    return typed(server, PromptedOutput(Person))


def typed(server: Server, output_type: Any) -> str:
    """A person out of a text."""
    extracting: Agent[None, Person] = Agent(
        model_of(server), output_type=output_type, model_settings=SETTINGS
    )
    return said(repr(extracting.run_sync(PERSON_TEXT).output), "age=36")


def responses(server: Server) -> str:
    """One answer through the Responses API."""
    model = model_of(server, OpenAIResponsesModel)
    return said(Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output, "Paris")


def main() -> None:
    """Try each function."""
    run_checks(
        "pydantic-ai-slim",
        *(run, stream, agent, tool_output, native_output, prompted_output, responses),
    )


if __name__ == "__main__":
    main()

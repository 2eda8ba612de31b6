# /// script
# dependencies = ["google-adk==2.13.0", "litellm==1.110.2"]
# ///
"""Google's Agent Development Kit, through LiteLLM: an answer, an agent with two tools, a schema."""

from __future__ import annotations

from typing import Any

from checks import Server, run_checks, said
from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import GenerateContentConfig
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


async def ask(server: Server, question: str, **options: Any) -> str:
    """The final answer of an agent."""
    model = LiteLlm(model=f"hosted_vllm/{server.model}", api_base=server.v1, api_key=server.key)
    config = GenerateContentConfig(temperature=0, max_output_tokens=MAX_TOKENS)
    made = Agent(name="shop", model=model, generate_content_config=config, **options)
    events = await InMemoryRunner(made).run_debug(question, quiet=True)
    parts = events[-1].content.parts if events[-1].content else ()
    return "".join(part.text or "" for part in parts or ())


async def run(server: Server) -> str:
    """Ask for one answer."""
    return said(await ask(server, QUESTION), "Paris")


async def agent(server: Server) -> str:
    """An agent with two tools."""
    tools = [calculate, look_up_price]
    return said(await ask(server, PRICE_QUESTION, instruction=INSTRUCTIONS, tools=tools), "24.9")


async def output_schema(server: Server) -> str:
    """An answer that follows a schema."""
    text = await ask(server, PERSON_TEXT, output_schema=Person)
    return said(repr(Person.model_validate_json(text)), "age=36")


def main() -> None:
    """Try each function."""
    run_checks("google-adk", run, agent, output_schema)


if __name__ == "__main__":
    main()

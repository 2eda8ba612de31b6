# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents: agents that call tools, and agents that write Python."""

from __future__ import annotations

from checks import Server, run_checks, said, too_small_if
from smolagents import AgentError, CodeAgent, MultiStepAgent, OpenAIModel, ToolCallingAgent, tool
from tasks import MAX_STEPS, MAX_TOKENS, PRICE_QUESTION, QUESTION, calculate, look_up_price


def model_of(server: Server) -> OpenAIModel:
    """A chat model for the server."""
    return OpenAIModel(
        server.model, api_base=server.v1, api_key=server.key, temperature=0, max_tokens=MAX_TOKENS
    )


def answer(agent: MultiStepAgent, question: str, expected: str) -> str:
    """The agent's final answer; a model that answers in no known format is too small."""
    with too_small_if(AgentError):
        return said(str(agent.run(question)), expected)


def chat(server: Server) -> str:
    """One answer of the model."""
    reply = model_of(server).generate([{"role": "user", "content": QUESTION}])
    return said(str(reply.content), "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    parts = model_of(server).generate_stream([{"role": "user", "content": QUESTION}])
    return said("".join(part.content or "" for part in parts), "Paris")


def tool_calling_agent(server: Server) -> str:
    """An agent that calls one of three tools in each step: two, and the final answer."""
    agent = ToolCallingAgent(
        tools=[tool(calculate), tool(look_up_price)],
        model=model_of(server),
        max_steps=MAX_STEPS,
        verbosity_level=0,
    )
    return answer(agent, PRICE_QUESTION, "24.9")


def code_agent(server: Server) -> str:
    """An agent that writes Python."""
    return answer(code_agent_of(server, by_schema=False), "What is 137 * 49?", "6713")


def structured_code_agent(server: Server) -> str:
    """The same, within a JSON schema."""
    return answer(code_agent_of(server, by_schema=True), "What is 137 * 49?", "6713")


def code_agent_of(server: Server, *, by_schema: bool) -> CodeAgent:
    """An agent that writes Python, in a schema or in text."""
    return CodeAgent(
        tools=[],
        model=model_of(server),
        max_steps=MAX_STEPS,
        verbosity_level=0,
        use_structured_outputs_internally=by_schema,
    )


def main() -> None:
    """Try each function."""
    run_checks("smolagents", chat, stream, tool_calling_agent, code_agent, structured_code_agent)


if __name__ == "__main__":
    main()

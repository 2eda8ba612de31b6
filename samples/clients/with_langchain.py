# /// script
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# ///
"""LangChain: an agent with two tools, structured output in three ways, the Responses API."""

from __future__ import annotations

from typing import Any

from checks import Server, run_checks, said, too_small_if
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain.messages import AIMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
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


def model_of(server: Server, **options: Any) -> ChatOpenAI:
    """A chat model for the server."""
    return ChatOpenAI(
        model=server.model,
        base_url=server.v1,
        api_key=server.key,
        temperature=0,
        max_tokens=MAX_TOKENS,
        **options,
    )


def invoke(server: Server) -> str:
    """Ask for one answer."""
    return said(model_of(server).invoke(QUESTION).text, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    return said("".join(chunk.text for chunk in model_of(server).stream(QUESTION)), "Paris")


def forced_call(server: Server) -> str:
    """A call that is required."""
    model = model_of(server).bind_tools([calculate, look_up_price], tool_choice="look_up_price")
    (call,) = model.invoke(PRICE_QUESTION).tool_calls
    return said(str(call["args"]), "lamp")


@wrap_model_call
def call_first(request: Any, handler: Any) -> Any:
    """Require a call in the first step of an agent, and only the response format later."""
    is_first = not any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(
        request.override(tool_choice="required", response_format=None) if is_first else request
    )


def calling_agent(server: Server) -> Any:
    """An agent that must call one of two tools first, and then answer in a format.

    The format keeps a small model from calling again and again.
    """
    return create_agent(
        model_of(server),
        tools=[calculate, look_up_price],
        system_prompt=INSTRUCTIONS,
        response_format=ProviderStrategy(Answer),
        middleware=[call_first],
    )


def agent(server: Server) -> str:
    """An agent that chooses among two tools by itself."""
    with too_small_if(GraphRecursionError):
        state = calling_agent(server).invoke(
            {"messages": [{"role": "user", "content": PRICE_QUESTION}]},
            {"recursion_limit": 2 * MAX_STEPS},
        )
    messages = state["messages"]
    calls = [call["name"] for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
    said(str(calls), "look_up_price")
    return said(state["structured_response"].answer, "24.9")


def json_schema(server: Server) -> str:
    """Structured output by a schema."""
    return structured(server, "json_schema")


def function_calling(server: Server) -> str:
    """Structured output by a call."""
    return structured(server, "function_calling")


def json_mode(server: Server) -> str:
    """Structured output by any JSON object."""
    return structured(server, "json_mode")


def structured(server: Server, method: Any) -> str:
    """A person out of a text."""
    model = model_of(server).with_structured_output(Person, method=method)
    return said(repr(model.invoke(PERSON_TEXT)), "age=36")


def responses(server: Server) -> str:
    """One answer through the Responses API."""
    return said(model_of(server, use_responses_api=True).invoke(QUESTION).text, "Paris")


def main() -> None:
    """Try each function."""
    run_checks(
        "langchain-openai",
        *(invoke, stream, forced_call, agent, json_schema, function_calling, json_mode, responses),
    )


if __name__ == "__main__":
    main()

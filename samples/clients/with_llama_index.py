# /// script
# dependencies = ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"]
# ///
"""LlamaIndex: chat, an agent with two tools, structured output."""

from __future__ import annotations

from checks import Server, run_checks, said, too_small_if
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.openai_like import OpenAILike
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


def model_of(server: Server, *, by_schema: bool = False) -> OpenAILike:
    """A chat model for the server."""
    return OpenAILike(
        model=server.model,
        api_base=server.v1,
        api_key=server.key,
        is_chat_model=True,
        is_function_calling_model=not by_schema,
        should_use_structured_outputs=by_schema,
        context_window=8192,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )


def chat(server: Server) -> str:
    """Ask for one answer."""
    reply = model_of(server).chat([ChatMessage(role="user", content=QUESTION)])
    return said(reply.message.content, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    parts = model_of(server).stream_chat([ChatMessage(role="user", content=QUESTION)])
    return said("".join(part.delta or "" for part in parts), "Paris")


async def agent(server: Server) -> str:
    """An agent that chooses among two tools by itself."""
    answering = FunctionAgent(
        tools=[calculate, look_up_price], llm=model_of(server), system_prompt=INSTRUCTIONS
    )
    with too_small_if(WorkflowRuntimeError):
        reply = await answering.run(PRICE_QUESTION, max_iterations=MAX_STEPS)
    said(str([call.tool_name for call in reply.tool_calls]), "look_up_price")
    return said(str(reply), "24.9")


def function_calling(server: Server) -> str:
    """Structured output by a call."""
    return structured(model_of(server))


def json_schema(server: Server) -> str:
    """Structured output by a schema."""
    return structured(model_of(server, by_schema=True))


def structured(model: OpenAILike) -> str:
    """A person out of a text."""
    return said(repr(model.structured_predict(Person, PromptTemplate(PERSON_TEXT))), "age=36")


def main() -> None:
    """Try each function."""
    run_checks("llama-index-core", chat, stream, agent, function_calling, json_schema)


if __name__ == "__main__":
    main()

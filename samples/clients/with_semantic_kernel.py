# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel: chat, functions that the model may call, structured output."""

from __future__ import annotations

from checks import Server, run_checks, said
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import kernel_function
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


class Shop:
    """The two tools, as a plugin."""

    @kernel_function(description="Calculates an arithmetic expression.")
    def calculate(self, expression: str) -> str:
        """The tool `tasks.calculate`."""
        return calculate(expression)

    @kernel_function(description="Looks up the price of an item in the shop's list.")
    def look_up_price(self, item: str) -> str:
        """The tool `tasks.look_up_price`."""
        return look_up_price(item)


def service_of(server: Server) -> OpenAIChatCompletion:
    """A chat service on the server's model."""
    client = AsyncOpenAI(base_url=server.v1, api_key=server.key)
    return OpenAIChatCompletion(ai_model_id=server.model, async_client=client)


def history_of(question: str, instructions: str | None = None) -> ChatHistory:
    """A conversation that begins with it."""
    history = ChatHistory(system_message=instructions)
    history.add_user_message(question)
    return history


async def chat(server: Server) -> str:
    """Ask for one answer."""
    settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=MAX_TOKENS)
    reply = await service_of(server).get_chat_message_content(history_of(QUESTION), settings)
    return said(str(reply), "Paris")


async def stream(server: Server) -> str:
    """An answer as it is written."""
    settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=MAX_TOKENS)
    parts = service_of(server).get_streaming_chat_message_content(history_of(QUESTION), settings)
    return said("".join([str(part) async for part in parts]), "Paris")


async def functions(server: Server) -> str:
    """Two functions that the model may call."""
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    settings = OpenAIChatPromptExecutionSettings(
        temperature=0,
        max_tokens=MAX_TOKENS,
        function_choice_behavior=FunctionChoiceBehavior.Auto(
            maximum_auto_invoke_attempts=MAX_STEPS
        ),
    )
    history = history_of(PRICE_QUESTION, INSTRUCTIONS)
    reply = await service_of(server).get_chat_message_content(history, settings, kernel=kernel)
    items = [item for message in history.messages for item in message.items]
    calls = [item.function_name for item in items if isinstance(item, FunctionCallContent)]
    said(str(calls), "look_up_price")
    return said(str(reply), "24.9")


async def response_format(server: Server) -> str:
    """An answer of a type."""
    settings = OpenAIChatPromptExecutionSettings(
        temperature=0, max_tokens=MAX_TOKENS, response_format=Person
    )
    reply = await service_of(server).get_chat_message_content(history_of(PERSON_TEXT), settings)
    return said(repr(Person.model_validate_json(str(reply))), "age=36")


def main() -> None:
    """Try each function."""
    run_checks("semantic-kernel", chat, stream, functions, response_format)


if __name__ == "__main__":
    main()

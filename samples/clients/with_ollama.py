# /// script
# dependencies = ["ollama==0.6.3"]
# ///
"""Ollama's Python package: chat, generate, tools, structured output, the models."""

from __future__ import annotations

from checks import Server, run_checks, said
from ollama import Client
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

OPTIONS = {"temperature": 0, "num_predict": MAX_TOKENS}


def chat(server: Server) -> str:
    """Ask for one answer."""
    reply = Client(host=server.url).chat(
        server.model, [{"role": "user", "content": QUESTION}], options=OPTIONS
    )
    assert reply.done
    return said(reply.message.content, "Paris")


def stream(server: Server) -> str:
    """An answer as it is written."""
    parts = list(
        Client(host=server.url).chat(
            server.model, [{"role": "user", "content": QUESTION}], stream=True, options=OPTIONS
        )
    )
    assert parts[-1].done
    return said("".join(part.message.content or "" for part in parts), "Paris")


def generate(server: Server) -> str:
    """A completion in the model's own template."""
    reply = Client(host=server.url).generate(server.model, QUESTION, options=OPTIONS)
    return said(reply.response, "Paris")


def tools(server: Server) -> str:
    """A call, its result, and an answer."""
    client = Client(host=server.url)
    messages: list[object] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": PRICE_QUESTION},
    ]
    functions = [calculate, look_up_price]
    reply = client.chat(server.model, messages, tools=functions, options=OPTIONS)
    messages.append(reply.message)
    for call in reply.message.tool_calls or ():
        (tool,) = (each for each in functions if each.__name__ == call.function.name)
        content = tool(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": content})
    said(str(reply.message.tool_calls), "look_up_price")
    answer = client.chat(server.model, messages, options=OPTIONS)
    return said(answer.message.content, "24.9")


def structured(server: Server) -> str:
    """An answer that follows a schema."""
    reply = Client(host=server.url).chat(
        server.model,
        [{"role": "user", "content": PERSON_TEXT}],
        format=Person.model_json_schema(),
        options=OPTIONS,
    )
    return said(repr(Person.model_validate_json(reply.message.content or "")), "age=36")


def models(server: Server) -> str:
    """The served models, and their details."""
    client = Client(host=server.url)
    names = [model.model for model in client.list().models]
    assert server.model in {(name or "").removesuffix(":latest") for name in names}
    return f"{names} {client.show(server.model).capabilities}"


def main() -> None:
    """Try each function."""
    run_checks("ollama", chat, stream, generate, tools, structured, models)


if __name__ == "__main__":
    main()

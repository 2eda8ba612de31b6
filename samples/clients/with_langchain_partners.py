# /// script
# dependencies = ["langchain-ollama==1.1.0", "langchain-anthropic==1.7.10"]
# ///
"""LangChain's packages for Ollama and Anthropic: answers, calls, structured output, vectors."""

from __future__ import annotations

from checks import Server, run_checks, said
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama, OllamaEmbeddings
from tasks import (
    ANIMALS,
    MAX_TOKENS,
    PERSON_TEXT,
    PRICE_QUESTION,
    QUESTION,
    SEA,
    Person,
    look_up_price,
    nearest,
)


def of_ollama(server: Server) -> ChatOllama:
    """A chat model over Ollama's API, with the options that Open WebUI sends."""
    return ChatOllama(
        model=server.model,
        base_url=server.url,
        temperature=0,
        num_predict=MAX_TOKENS,
        repeat_last_n=64,
        keep_alive="5m",
    )


def of_anthropic(server: Server) -> ChatAnthropic:
    """A chat model over Anthropic's API."""
    return ChatAnthropic(
        model_name=server.model,
        base_url=server.url,
        api_key=server.key,
        temperature=0,
        max_tokens_to_sample=MAX_TOKENS,
    )


def _written(model: BaseChatModel) -> str:
    return "".join(chunk.text for chunk in model.stream(QUESTION))


def ollama(server: Server) -> str:
    """Ask for one answer."""
    return said(of_ollama(server).invoke(QUESTION).text, "Paris")


def ollama_stream(server: Server) -> str:
    """An answer as it is written."""
    return said(_written(of_ollama(server)), "Paris")


def ollama_call(server: Server) -> str:
    """A call by choice."""
    reply = of_ollama(server).bind_tools([look_up_price]).invoke(PRICE_QUESTION)
    return said(str(reply.tool_calls), "lamp")


def ollama_schema(server: Server) -> str:
    """An answer that follows a schema."""
    model = of_ollama(server).with_structured_output(Person)
    return said(repr(model.invoke(PERSON_TEXT)), "age=36")


def ollama_embeddings(server: Server) -> str:
    """Vectors of documents and of a question about them."""
    model = OllamaEmbeddings(model=server.embedding_model, base_url=server.url)
    return nearest(model.embed_query(SEA), model.embed_documents(ANIMALS))


def anthropic(server: Server) -> str:
    """Ask for one answer."""
    return said(of_anthropic(server).invoke(QUESTION).text, "Paris")


def anthropic_stream(server: Server) -> str:
    """An answer as it is written."""
    return said(_written(of_anthropic(server)), "Paris")


def anthropic_call(server: Server) -> str:
    """A call that is required."""
    model = of_anthropic(server).bind_tools([look_up_price], tool_choice="look_up_price")
    return said(str(model.invoke(PRICE_QUESTION).tool_calls), "lamp")


def anthropic_schema(server: Server) -> str:
    """An answer by a call that is required."""
    model = of_anthropic(server).with_structured_output(Person)
    return said(repr(model.invoke(PERSON_TEXT)), "age=36")


def main() -> None:
    """Try each function."""
    run_checks(
        "langchain-ollama",
        *(ollama, ollama_stream, ollama_call, ollama_schema, ollama_embeddings),
        *(anthropic, anthropic_stream, anthropic_call, anthropic_schema),
    )


if __name__ == "__main__":
    main()

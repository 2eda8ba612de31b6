# /// script
# dependencies = ["outlines==1.3.3", "openai==3.57.0"]
# ///
"""Outlines: choices, patterns and schemas, through its models for OpenAI, vLLM and SGLang."""

from __future__ import annotations

from typing import Literal

import openai
import outlines
from checks import Server, run_checks, said
from outlines.types import Regex
from tasks import MAX_TOKENS, PERSON_TEXT, QUESTION, Person


def client(server: Server) -> openai.OpenAI:
    """OpenAI's client, which all three use."""
    return openai.OpenAI(base_url=server.v1, api_key=server.key)


def as_openai(server: Server) -> str:
    """A schema, as OpenAI's response format."""
    model = outlines.from_openai(client(server), server.model)
    text = model(PERSON_TEXT, Person, max_tokens=MAX_TOKENS, temperature=0)
    return said(repr(Person.model_validate_json(text)), "age=36")


def as_vllm_choice(server: Server) -> str:
    """One of several words."""
    model = outlines.from_vllm(client(server), server.model)
    text = model(QUESTION, Literal["London", "Paris"], max_tokens=MAX_TOKENS, temperature=0)
    assert text in ("London", "Paris")
    return said(str(text), "Paris")


def as_vllm_regex(server: Server) -> str:
    """An answer by a pattern."""
    model = outlines.from_vllm(client(server), server.model)
    text = model("What is 2 + 2?", Regex(r"[0-9]{1,3}"), max_tokens=MAX_TOKENS, temperature=0)
    return str(int(text))


def as_sglang_regex(server: Server) -> str:
    """A pattern, by SGLang's field."""
    model = outlines.from_sglang(client(server), server.model)
    text = model("What is 2 + 2?", Regex(r"[0-9]{1,3}"), max_tokens=MAX_TOKENS, temperature=0)
    return str(int(text))


def as_sglang_schema(server: Server) -> str:
    """A schema, in SGLang's form."""
    model = outlines.from_sglang(client(server), server.model)
    text = model(PERSON_TEXT, Person, max_tokens=MAX_TOKENS, temperature=0)
    return said(repr(Person.model_validate_json(text)), "age=36")


def main() -> None:
    """Try each function."""
    run_checks(
        "outlines", as_openai, as_vllm_choice, as_vllm_regex, as_sglang_regex, as_sglang_schema
    )


if __name__ == "__main__":
    main()

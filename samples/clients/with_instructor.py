# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""Instructor: a typed extraction in each of its modes, and a list as it is written."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
from checks import Server, run_checks, said
from openai import OpenAI
from tasks import MAX_TOKENS, PERSON_TEXT, Person


def extract(server: Server, mode: instructor.Mode) -> str:
    """A person out of a text."""
    person = client_of(server, mode).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": PERSON_TEXT}],
        response_model=Person,
        max_retries=0,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    return said(repr(person), "age=36")


def client_of(server: Server, mode: instructor.Mode) -> instructor.Instructor:
    """A client for the server."""
    return instructor.from_openai(OpenAI(base_url=server.v1, api_key=server.key), mode=mode)


def tools(server: Server) -> str:
    """By a call, the default."""
    return extract(server, instructor.Mode.TOOLS)


def tools_strict(server: Server) -> str:
    """By a strict call."""
    return extract(server, instructor.Mode.TOOLS_STRICT)


def json_mode(server: Server) -> str:
    """By any JSON object."""
    return extract(server, instructor.Mode.JSON)


def json_schema(server: Server) -> str:
    """By a schema."""
    return extract(server, instructor.Mode.JSON_SCHEMA)


def markdown_json(server: Server) -> str:
    """By JSON in Markdown, which nothing constrains."""
    return extract(server, instructor.Mode.MD_JSON)


def iterable(server: Server) -> str:
    """Two people, each as soon as it is whole."""
    people = client_of(server, instructor.Mode.TOOLS).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Ada was 36 and Alan 41 years old. List both."}],
        response_model=Iterable[Person],
        stream=True,
        max_retries=0,
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    return said(str(list(people)), "age=41")


def main() -> None:
    """Try each function."""
    run_checks("instructor", tools, tools_strict, json_mode, json_schema, markdown_json, iterable)


if __name__ == "__main__":
    main()

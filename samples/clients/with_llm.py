# /// script
# dependencies = ["llm==0.36"]
# ///
"""`llm`: the model as its configuration file names it, with a schema and with tools."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml
from checks import Server, run_checks, said, too_small_if
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

OPTIONS = {"temperature": 0, "max_tokens": MAX_TOKENS}
ENTRY = {"model_id": "triptych", "supports_schema": True, "supports_tools": True}


def model_of(server: Server) -> Any:
    """The model by an entry in `extra-openai-models.yaml`, as a user writes it."""
    folder = Path(os.environ.setdefault("LLM_USER_PATH", mkdtemp()))
    entry = {**ENTRY, "model_name": server.model, "api_base": server.v1}
    (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump([entry]))
    import llm  # reads the folder's name when it is first used

    model = llm.get_model("triptych")
    model.key = server.key
    return model


def prompt(server: Server) -> str:
    """Ask for one answer."""
    return said(
        model_of(server).prompt(QUESTION, stream=False, **OPTIONS).text(),
        "Paris",
    )


def stream(server: Server) -> str:
    """An answer as it is written."""
    return said("".join(model_of(server).prompt(QUESTION, **OPTIONS)), "Paris")


def schema(server: Server) -> str:
    """An answer that follows a schema."""
    reply = model_of(server).prompt(PERSON_TEXT, schema=Person, stream=False, **OPTIONS)
    return said(repr(Person.model_validate_json(reply.text())), "age=36")


def tools(server: Server) -> str:
    """Two tools, until there is an answer."""
    calls: list[str] = []
    chain = (
        model_of(server)
        .conversation()
        .chain(
            PRICE_QUESTION,
            tools=[calculate, look_up_price],
            options=OPTIONS,
            system=INSTRUCTIONS,
            chain_limit=MAX_STEPS,
            before_call=lambda tool, call: calls.append(call.name),
        )
    )
    with too_small_if(ValueError):  # at the limit
        text = chain.text()
    said(str(calls), "look_up_price")
    return said(text, "24.9")


def main() -> None:
    """Try each function."""
    run_checks("llm", prompt, stream, schema, tools)


if __name__ == "__main__":
    main()

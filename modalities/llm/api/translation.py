"""What other APIs than OpenAI's share: their bodies in the words of chat, and back.

Owns how chat says what other APIs have, too, and how an error about that names the fields that the
caller sent. Knows no API by name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import from_json

from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.http.errors import to_public
from triptych.core.text.threads import on_text_thread
from triptych.modalities.llm.api.generation import chat_request
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.text import TextModel

Fields = dict[str, Any]
Names = Mapping[str, str]
"""What a caller's API calls fields of chat, by patterns of their paths."""

_REST = r"(?:\.\w+|\[\d+\])*"


def given(fields: Fields) -> Fields:
    """The fields that say anything."""
    return {name: value for name, value in fields.items() if value is not None}


def call_fields(call_id: str, name: str, arguments: Mapping[str, Any]) -> Fields:
    """A call in an earlier answer."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def schema_form(schema: Mapping[str, Any]) -> Fields:
    """The form of an answer that follows a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def written_arguments(text: str) -> Fields:
    """The arguments of a call; of one that broke off, as far as they were written."""
    found = from_json(text or "{}", allow_partial=True)
    return found if isinstance(found, dict) else {}


def check_thinks(model: TextModel, field: str) -> None:
    """Raise `InvalidRequest` where a model that does not think is told to, by `field`."""
    if not model.answers.has_reasoning:
        raise InvalidRequest(f"{model.name} does not think: leave {field} out.", param=field)


async def translated(request: Request, say: Callable[[], Fields]) -> ChatRequest:
    """The chat request of what `say` makes of a body, which for a long one takes long."""

    def work() -> ChatRequest:
        return chat_request(say())

    return await on_text_thread(len(await request.body()), work)


@contextmanager
def rename_errors(names: Names) -> Iterator[None]:
    """Raise errors about fields of chat with the names of the caller's fields."""
    try:
        yield
    except (RequestValidationError, TriptychError) as error:
        raise rename_error(to_public(error), names) from error


def rename_error(error: TriptychError, names: Names) -> TriptychError:
    """The error with the names of the caller's fields in its message and its `param`."""
    message, param = error.message, error.param
    for path, name in names.items():
        pattern = re.compile(rf"\b(?:{path})(?!\w){_REST}")
        message = pattern.sub(name, message)
        param = param and pattern.sub(name, param)
    renamed = copy.copy(error)
    renamed.args, renamed.message, renamed.param = (message,), message, param
    return renamed

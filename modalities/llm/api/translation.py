"""Translation between other text APIs and chat requests.

Owns the fields of chat that several APIs translate to, and the names of the caller's fields in
errors about them. Knows no API by name.
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
"""The names of chat's fields in another API, by patterns of their paths."""

_REST = r"(?:\.\w+|\[\d+\])*"


def without_none(fields: Fields) -> Fields:
    """The fields that are not `None`."""
    return {name: value for name, value in fields.items() if value is not None}


def call_fields(call_id: str, name: str, arguments: Mapping[str, Any]) -> Fields:
    """A call in an earlier answer."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def schema_form(schema: Mapping[str, Any]) -> Fields:
    """The response format of an answer that follows a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def parse_arguments(text: str) -> Fields:
    """The arguments of a call, as far as they were written."""
    found = from_json(text or "{}", allow_partial=True)
    return found if isinstance(found, dict) else {}


def check_has_reasoning(model: TextModel, field: str) -> None:
    """Raise `InvalidRequest` about `field` if the model has no reasoning."""
    if not model.answers.has_reasoning:
        raise InvalidRequest(f"{model.name} has no reasoning: leave {field} out.", param=field)


async def translate(request: Request, say: Callable[[], Fields]) -> ChatRequest:
    """The chat request with the fields that `say` makes of a body; on a thread for long bodies."""

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

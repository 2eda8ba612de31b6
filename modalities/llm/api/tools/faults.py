"""Which tool's schema cannot be followed, where the grammar of all of them failed.

Owns the search, which ends early: a schema that fails is found soon, and a caller who sends many
that are slow waits for none but the first.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from triptych.core.errors import RequestError
from triptych.core.grammar.source import Constraint
from triptych.modalities.llm.api.tools.schema import Offer

_SEARCH_S: Final = 2.0
_KEYWORD: Final = re.compile(r"cannot be enforced: ([^\s,.]+)")

Check = Callable[[Constraint], Awaitable[object]]
"""Raises `RequestError` for a form that cannot be followed."""


async def blamed(error: RequestError, offer: Offer, check: Check) -> RequestError:
    """`error`, or that of the tool whose schema is its cause, which it names."""
    try:
        async with asyncio.timeout(_SEARCH_S):
            for tool in offer.tools:
                schema = tool.function.parameters or {}
                try:
                    await check(Constraint("json_schema", json.dumps(schema), "tools"))
                except RequestError as found:
                    place = place_of_keyword(schema, found.message)
                    message = f"The parameters of tool {tool.function.name}{place}: {found.message}"
                    return type(found)(message, param="tools")
    except TimeoutError:
        pass
    return error


def place_of_keyword(schema: Any, message: str) -> str:
    """Where in `schema` the keyword stands that `message` is about; nothing where it does not."""
    found = _KEYWORD.search(message)
    path = None if found is None else _path_to(schema, found[1])
    return "" if path is None else f", at {path}"


def _numbered(node: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(node) if isinstance(node, list) else ()


def _path_to(node: Any, keyword: str) -> str | None:
    """`properties.city.keyword`, the first there is."""
    if isinstance(node, dict) and keyword in node:
        return keyword
    parts = node.items() if isinstance(node, dict) else _numbered(node)
    for name, part in parts:
        if (rest := _path_to(part, keyword)) is not None:
            return f"{name}.{rest}"
    return None

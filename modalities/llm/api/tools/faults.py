"""Which tool's schema cannot be followed, where the grammar of all of them failed.

Owns the search, which ends early: a schema that fails is found soon, and a caller who sends many
that are slow waits for none but the first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

from triptych.core.errors import RequestError
from triptych.core.grammar.constraint import Constraint
from triptych.modalities.llm.api.tools.schema import ToolSet

_SEARCH_S: Final = 2.0

Check = Callable[[Constraint], Awaitable[object]]
"""Raises `RequestError` for a form that cannot be followed."""


async def name_tool(error: RequestError, tool_set: ToolSet, check: Check) -> RequestError:
    """`error`, or that of the tool whose schema is its cause, which it names."""
    try:
        async with asyncio.timeout(_SEARCH_S):
            for tool in tool_set.tools:
                schema = tool.function.parameters or {}
                try:
                    await check(Constraint("json_schema", json.dumps(schema), "tools"))
                except RequestError as found:
                    message = f"The parameters of tool {tool.function.name}: {found.message}"
                    return type(found)(message, param="tools")
    except TimeoutError:
        pass
    return error

"""Finds the tool whose schema cannot be enforced after the grammar of all tools failed.

Owns the search and its time limit: a failing schema is found soon, and a caller with many slow
schemas waits for the first only.
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
"""Raises `RequestError` for a constraint that cannot be enforced."""


async def name_tool(error: RequestError, tool_set: ToolSet, check: Check) -> RequestError:
    """The error of the tool whose schema is the cause, with its name; or `error` itself."""
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

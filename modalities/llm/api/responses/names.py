"""Names of functions: the client's name, with an optional namespace, and the model's name.

Owns both names and their limits. Knows nothing else about functions.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from pydantic import StringConstraints

from triptych.core.errors import InvalidRequest
from triptych.modalities.llm.api.tools.schema import MAX_TOOL_NAME_CHARS

Namespace = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]*$", max_length=MAX_TOOL_NAME_CHARS)
]
"""The namespace of a function; an empty one means none."""
_JOINT: Final = "__"
"""The separator of namespace and name, as MCP clients write it."""


class FunctionPlace(NamedTuple):
    """The client's name of a function, with its namespace, if any."""

    name: str
    namespace: str | None = None

    @property
    def model_name(self) -> str:
        """The model's name of the function."""
        if not self.namespace:
            return self.name
        return f"{self.namespace.removesuffix(_JOINT)}{_JOINT}{self.name}"

    def check(self, param: str) -> None:
        """Raise `InvalidRequest` if the model's name of the function is too long."""
        name = self.model_name
        if len(name) > MAX_TOOL_NAME_CHARS:
            raise InvalidRequest(
                f"Namespace and name together have at most {MAX_TOOL_NAME_CHARS} characters;"
                f" {name[:60]!a}... has {len(name)}.",
                param=param,
            )

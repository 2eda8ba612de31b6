"""What a function is called: by its client, perhaps in a namespace, and by the model.

Knows nothing else about functions.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from pydantic import StringConstraints

from triptych.core.errors import InvalidRequest
from triptych.modalities.llm.api.tools.schema import MAX_TOOL_NAME_CHARS

Namespace = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]*$", max_length=MAX_TOOL_NAME_CHARS)
]
"""Where a function was called; an empty one is none."""
_JOINT: Final = "__"
"""Between a namespace and a name, as clients of MCP write it."""


class FunctionPlace(NamedTuple):
    """Where a client has a function: its name, in a namespace or in none."""

    name: str
    namespace: str | None = None

    @property
    def model_name(self) -> str:
        """The one name by which the model knows it."""
        if not self.namespace:
            return self.name
        return f"{self.namespace.removesuffix(_JOINT)}{_JOINT}{self.name}"

    def check(self, param: str) -> None:
        """Raise `InvalidRequest` where the model's name for it is too long."""
        name = self.model_name
        if len(name) > MAX_TOOL_NAME_CHARS:
            raise InvalidRequest(
                f"A namespace and a name in it have at most {MAX_TOOL_NAME_CHARS} characters"
                f" together; {name[:60]!a}... has {len(name)}.",
                param=param,
            )

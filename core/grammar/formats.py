"""Formats of JSON schemas: the enforced ones, and the check for `strict`.

Knows no library. The check is one walk, short enough for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from triptych.core.errors import UnsupportedOption
from triptych.core.grammar.document import parts_of
from triptych.core.grammar.patterns import FORMATS

ENFORCED: Final = frozenset({*FORMATS, "duration", "email", "ipv4", "ipv6", "uri", "uuid"})
"""Names of enforced formats; all other formats are annotations."""


_Trail = tuple["_Trail", str] | None
"""The location of a schema: that of its parent, and the step from there."""


def check_formats(schema: Mapping[str, Any], param: str) -> None:
    """Raise `UnsupportedOption` for an unenforced format without a `pattern`."""
    nodes: list[tuple[Any, _Trail]] = [(schema, None)]
    while nodes:
        node, trail = nodes.pop()
        if not isinstance(node, dict):
            continue
        for word, value in node.items():
            nodes += [(part, (trail, f"/{word}{step}")) for step, part in parts_of(word, value)]
        name = node.get("format")
        if isinstance(name, str) and name not in ENFORCED and "pattern" not in node:
            raise UnsupportedOption(
                f"The format {name[:40]} at {_place(trail)} cannot be enforced, as strict asks: add"
                " a pattern, or leave strict out.",
                param=param,
            )


def _place(trail: _Trail) -> str:
    steps: list[str] = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    return "".join(["#", *reversed(steps)])

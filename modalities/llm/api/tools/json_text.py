"""JSON that models write, complete or still being written.

Owns how much of a source belongs to a value, and the value of a complete text. The grammar is
`json_scanner`'s, the repair of faulty text `json_mending`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from triptych.modalities.llm.api.tools.json_mending import JsonMender
from triptych.modalities.llm.api.tools.json_scanner import JsonScanner
from triptych.modalities.llm.api.tools.source import FoundT, TextSource


def json_text(
    source: TextSource, found: Callable[[str], FoundT]
) -> Generator[FoundT | None, None, bool]:
    """Yield the mended text of one object or array as it arrives; return whether it is valid.

    Text from the place where it cannot be mended stays in the source.
    """
    mender = JsonMender()
    while not mender.is_done:
        text, length, is_broken = "", 0, False
        while length < len(source.text) and not (mender.is_done or is_broken):
            piece = mender.push(source.text[length])
            is_broken = piece is None
            if piece is not None:
                text, length = text + piece, length + 1
        source.take(length)
        is_cut = source.is_over and not mender.is_done
        if is_cut and not is_broken:
            text += mender.finish()
        if text:
            yield found(text)
        if is_broken or is_cut:
            return False
        if not mender.is_done:
            yield None
    return True


def json_value(source: TextSource) -> Generator[None, None, str | None]:
    """The text of a whole value; `None` if it is invalid, with the source in the midst of it."""
    scanner, text = JsonScanner(), ""
    yield from source.spaces()
    while (char := (yield from source.next())) and scanner.push(char):
        text += source.take(1)
        if scanner.is_done:
            return text
    return text.rstrip() if scanner.finish() else None


def load_json(text: str) -> Any:
    """The value of a complete text; `None` if it is not JSON (`NaN` is not)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)

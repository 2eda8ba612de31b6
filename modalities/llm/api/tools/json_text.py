"""JSON that models write, whole or still being written.

Owns how much of a source belongs to a value, and what a whole text means. The grammar is
`json_scanner`'s, and what is mended of the text `json_mending`'s.
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
    """Yield the text of one object or array as it comes, mended; whether it came to a valid end.

    Beyond the place where it cannot be mended everything is left in the source.
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
    """The text of a whole value; `None` where there is none, with the source in its midst."""
    scanner, text = JsonScanner(), ""
    yield from source.spaces()
    while (char := (yield from source.next())) and scanner.push(char):
        text += source.take(1)
        if scanner.is_done:
            return text
    return text.rstrip() if scanner.finish() else None


def loaded(text: str) -> Any:
    """The value of a whole text; `None` where it is no JSON, as `NaN` is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)

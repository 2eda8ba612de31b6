"""JSON that is one line for every reader.

Owns the escapes of characters that JSON allows in strings but that many programs treat as line
ends: `str.splitlines`, httpx's `iter_lines`. Knows no document.
"""

from __future__ import annotations

_LINE_ENDS = tuple(
    (char.encode(), f"\\u{ord(char):04x}".encode()) for char in ("\x85", "\u2028", "\u2029")
)


def escape_line_ends(text: bytes) -> bytes:
    """The same JSON document in UTF-8, with U+0085, U+2028 and U+2029 as escapes.

    They only occur inside strings, and no other character's bytes contain theirs.
    """
    for raw, escape in _LINE_ENDS:
        text = text.replace(raw, escape)
    return text

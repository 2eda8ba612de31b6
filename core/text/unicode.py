"""Text that is none: halves of characters, which no tokenizer and no file takes.

Owns the check for text that did not come over HTTP, where `core.http.body` refuses the bytes: a
command line that is not UTF-8, and strings of Python.
"""

from __future__ import annotations

from triptych.core.errors import InvalidRequest


def check_text(text: str, param: str) -> None:
    """Raises `InvalidRequest`, naming `param`, for text with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode text.", param=param) from error

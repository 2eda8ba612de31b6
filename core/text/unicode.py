"""Detecting lone surrogates, which no tokenizer and no file accepts.

Owns the check for text that did not arrive over HTTP, where `core.http.body` refuses the bytes:
command lines that are not UTF-8, and Python strings.
"""

from __future__ import annotations

from triptych.core.errors import InvalidRequest


def check_text(text: str, param: str) -> None:
    """Raise `InvalidRequest`, naming `param`, for text with a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode text.", param=param) from error

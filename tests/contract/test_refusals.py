"""What the page of architectures says of those that are refused: words, not fragments of Python."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
_ROW = re.compile(r"^\| `([^`]+)` \| \S+ \| refused \| (.*) \|$", re.MULTILINE)
_FRAGMENT = re.compile(
    r"NoneType|\bobject (?:is|of|has)\b|index out of range|argument must|argument in the config"
    r"|unsupported operand|has no (?:attribute|len)|: '[^']*'\.?$|<class"
)


def test_no_reason_is_a_fragment_of_python() -> None:
    reasons = dict(_ROW.findall(PAGE.read_text("utf-8")))
    assert len(reasons) > 100
    assert not {name: reason for name, reason in reasons.items() if _FRAGMENT.search(reason)}


def test_every_reason_is_a_sentence() -> None:
    for name, reason in _ROW.findall(PAGE.read_text("utf-8")):
        assert reason.endswith("."), name

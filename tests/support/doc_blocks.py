"""The fenced blocks of README and docs, in order, with their marks.

A block that no test can run has a comment before its fence, which readers do not see:
`<!-- not run: REASON -->`, with a reason from `REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
REASONS = {
    "gpu": "needs a GPU",
    "hub": "needs a model that is not part of the embedded set",
    "cluster": "needs several machines, or Ray",
    "server": "needs a server with other options",
    "client": "needs a program that the tests do not install",
    "long": "takes longer than a test may, or does not end",
    "excerpt": "is a part of a file or of a longer program",
}
RUN = frozenset({"sh", "python"})
"""Languages of blocks that are run unless marked."""
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*(\S*)\s*$")
_MARK = re.compile(r"^\s*<!-- not run: (.*?) *-->\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it begins, its language, its text, and the reason of its mark."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in RUN and self.reason is None


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page's text."""
    return list(_read(text.splitlines(), page))


def _read(lines: list[str], page: str) -> Iterator[Block]:
    opened: re.Match[str] | None = None
    begin = 0
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if opened is None:
            opened, begin = fence, number
        elif fence and fence[2].startswith(opened[2]) and not fence[3]:
            indent = len(opened[1])
            content = "".join(f"{each[indent:]}\n" for each in lines[begin + 1 : number])
            mark = _MARK.match(lines[begin - 1]) if begin else None
            yield Block(page, begin + 1, opened[3], content, mark[1] if mark else None)
            opened = None
    assert opened is None, f"{page}:{begin + 1}: the block does not end"


@cache
def pages() -> dict[str, list[Block]]:
    """The blocks of each page that readers open, by its path from the root."""
    found = [*ROOT.glob("*.md")]
    for folder in ("docs", "samples", "docker"):
        found += (ROOT / folder).rglob("*.md")
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return {name: blocks_of((ROOT / name).read_text("utf-8"), name) for name in names}


def all_blocks() -> list[Block]:
    return [block for blocks in pages().values() for block in blocks]

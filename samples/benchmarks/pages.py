"""Sections of documents that a benchmark writes: `<!-- name -->` to `<!-- /name -->`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_section(path: Path, name: str, content: str) -> None:
    """Replace the text between the markers of `name`; without them, append the section."""
    begins, ends = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = f"{begins}\n\n{content.strip()}\n\n{ends}"
    page = path.read_text(encoding="utf-8")
    if begins in page:
        before, _, rest = page.partition(begins)
        page = before + section + rest.partition(ends)[2]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    path.write_text(page, encoding="utf-8")


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every column but the first is aligned to the right."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

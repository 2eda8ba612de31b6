"""Links of README and docs lead to files and headings that exist."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from support.doc_blocks import ROOT, pages

_CODE = re.compile(
    r"^ *(```|~~~).*?^ *\1[^\n]*$|(`+)(?!`).+?(?<!`)\2(?!`)", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
_SOURCE = re.compile(r'(?:src|srcset|href)="(?!\w+:)([^"#]+)(?:#([^"]+))?"')
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def broken(page: Path, text: str) -> list[str]:
    """Links of `text`, as if it were that page's, that lead nowhere."""
    prose = _CODE.sub("", text)
    found = []
    for path, anchor in [*_LINK.findall(prose), *_SOURCE.findall(prose)]:
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page, (ROOT / page).read_text("utf-8")) == []


def test_links_that_lead_nowhere_are_found() -> None:
    text = (
        "[a](docs/missing.md) [b](docs/models.md#no-such-heading) [c](#nor-this) `[d](code.md)`\n"
        "```\n[e](in_a_block.md)\n```\n![f](docs/missing.png) [g](https://example.com/x)\n"
        '[h](CONTRIBUTING.md#set-up) [i](docs/models.md#models) <img src="docs/gone.png">\n'
    )
    found = broken(ROOT / "README.md", text)
    assert found == [
        "docs/missing.md#",
        "docs/models.md#no-such-heading",
        "#nor-this",
        "docs/missing.png#",
        "docs/gone.png#",
    ]

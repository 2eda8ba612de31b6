"""Links of the site: pages are written for the repository, where relative paths differ.

A hook of mkdocs. Owns the mapping from a path of the repository to a page of the site. A link to a
file that is not on the site, such as code, becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")
_SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
_PAGES = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "docs/decisions": "decisions/README.md",
}


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """The text of a page with snippets included and links rewritten for the site."""
    here = f"docs/{page.file.src_uri}"
    snippet = _SNIPPET.fullmatch(markdown.strip())
    if snippet:
        here = snippet[1]
        with open(here, encoding="utf-8") as file:
            markdown = file.read()
    folder = posixpath.dirname(page.file.src_uri)
    known = set(files.src_uris)

    def follow(link: re.Match[str]) -> str:
        mark, text, path, anchor = link.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        uri = _PAGES.get(target, target.removeprefix("docs/"))
        if uri not in known:
            return f"{text}"
        return f"{mark}[{text}]({posixpath.relpath(uri, folder or '.')}{anchor or ''})"

    return _LINK.sub(follow, markdown)

"""Static files for browsers: the page at `/`, the API reference at `/docs`, and their assets.

Owns paths, media types, the content security policy and caching. The files are read once, at start.
Knows nothing of their content.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych.core.errors import NotFound

FILES_ROUTE = "/page/"
"""Path of the scripts, styles and images."""

_PARTS = "parts"
"""Folder of fragments that several pages include."""
_INCLUDE = re.compile(rb"^ *<!-- include (\w+) -->\n", re.MULTILINE)
_MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".txt": "text/plain; charset=utf-8",  # the fonts' licence
        ".webp": "image/webp",
        ".woff2": "font/woff2",
    }
)
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' blob: data:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no string can become markup or code
        "trusted-types 'none'",
    )
)
_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), display-capture=(), geolocation=(), microphone=(self)",
        "cache-control": "no-cache",  # cached, but revalidated by its tag
        "vary": "accept",  # other clients may get another response at the same path
    }
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file to serve. Its `tag` changes with the content."""

    content: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> PageFile:
        """Read the file at `path`; its suffix sets the media type, and pages include fragments."""
        content = path.read_bytes()
        if path.suffix == ".html":
            parts = path.parent / _PARTS
            content = _INCLUDE.sub(
                lambda found: (parts / f"{found[1].decode()}.html").read_bytes(), content
            )
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, _MEDIA_TYPES[path.suffix], f'"{digest}"')


Pages = Mapping[str, PageFile]
"""Files by the path at which they are served."""


def read_pages(folder: Path) -> Pages:
    """Read `folder`: `index.html` for `/`, `docs.html` for `/docs`, other files for `/page/`.

    Fragments in `parts/` are served only inside the pages that include them.
    """
    found = {}
    for path in sorted(folder.rglob("*.*")):
        name = path.relative_to(folder)
        if _PARTS not in name.parts:
            found[_route_of(name.as_posix())] = PageFile.read(path)
    return found


def _route_of(name: str) -> str:
    if not name.endswith(".html"):
        return FILES_ROUTE + name
    return "/" + name.removesuffix(".html").removesuffix("index")


class PagesRouter(APIRouter):
    """Serves the files, which are not part of the API document.

    `public` are the routes that need no key: a browser loads a page before its user can enter one.
    """

    def __init__(self, pages: Pages) -> None:
        super().__init__(include_in_schema=False)
        self.public = frozenset(itertools.product(("GET", "HEAD"), pages))
        self._pages = pages
        for route in ("/", "/docs", FILES_ROUTE + "{name:path}"):
            self.add_api_route(route, self._show, methods=["GET"])

    async def _show(self, request: Request) -> Response:
        file = self._pages.get(request.scope["path"])
        if file is None:
            raise NotFound("There is no such file here.")
        headers = dict(_HEADERS) | {"etag": file.tag}
        if _is_kept(request.headers.get("if-none-match", ""), file.tag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _is_kept(tags: str, tag: str) -> bool:
    """Whether the browser already has the file with this tag."""
    return any(given.strip().removeprefix("W/") in (tag, "*") for given in tags.split(","))

"""Files for browsers: what is sent with them, who may have them, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.http import FakeEngine, in_process, make_app, refused
from triptych.core.http.page import Pages, read_pages

FILES = {
    "index.html": "<!doctype html><title>One</title>",
    "docs.html": "<!doctype html><title>Docs</title>",
    "scripts/main.js": "export {};",
    "styles/base.css": "body { margin: 0 }",
    "icon.svg": "<svg/>",
    "fonts/one.woff2": "font",
    "fonts/OFL.txt": "licence",
    "pictures/one.webp": "picture",
}
KEY = {"authorization": "Bearer right"}


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return read_pages(write(tmp_path / "page"))


def write(folder: Path, **changes: str) -> Path:
    for name, content in (FILES | changes).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/docs", "docs.html", "text/html; charset=utf-8"),
        ("/page/scripts/main.js", "scripts/main.js", "text/javascript; charset=utf-8"),
        ("/page/styles/base.css", "styles/base.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "icon.svg", "image/svg+xml"),
        ("/page/fonts/one.woff2", "fonts/one.woff2", "font/woff2"),
        ("/page/fonts/OFL.txt", "fonts/OFL.txt", "text/plain; charset=utf-8"),
        ("/page/pictures/one.webp", "pictures/one.webp", "image/webp"),
    ],
)
async def test_a_file_is_sent_with_its_type_and_what_it_may_do(
    tmp_path: Path, pages: Pages, path: str, name: str, kind: str
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(), pages=pages)) as client:
        reply, head = await client.get(path), await client.head(path)
    assert reply.text == FILES[name]
    assert head.content == b""
    assert reply.headers["content-type"] == head.headers["content-type"] == kind
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["font-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"


async def test_a_browser_keeps_a_file_until_it_changes(tmp_path: Path, pages: Pages) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(), pages=pages)) as client:
        first = await client.get("/")
        tag = first.headers["etag"]
        for tags in (tag, f'W/{tag}, "other"', "*"):
            again = await client.get("/", headers={"if-none-match": tags})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
        other = await client.get("/", headers={"if-none-match": '"other"'})
        assert other.status_code == 200
    changed = read_pages(write(tmp_path / "page", **{"index.html": "<!doctype html>"}))
    assert changed["/"].tag != tag
    assert changed["/docs"].tag == pages["/docs"].tag


def test_pages_have_their_common_parts_in_them(tmp_path: Path) -> None:
    parts = {"parts/head.html": "  <meta>\n", "parts/end.html": "  <p>\\1</p>\n"}
    html = "<head>\n  <!-- include head -->\n</head>\n  <!-- include end -->\n<!-- a remark -->\n"
    folder = write(tmp_path / "page", **parts, **{"docs.html": html})
    pages = read_pages(folder)
    whole = b"<head>\n  <meta>\n</head>\n  <p>\\1</p>\n<!-- a remark -->\n"
    assert pages["/docs"].content == whole
    assert not any("parts" in path or "head" in path for path in pages)
    tag = pages["/docs"].tag
    write(folder, **{"docs.html": html, "parts/head.html": "  <meta name>\n"})
    assert read_pages(folder)["/docs"].tag != tag


async def test_files_need_no_key_and_open_nothing_else(tmp_path: Path, pages: Pages) -> None:
    app = make_app(tmp_path, FakeEngine(), pages=pages, api_key=("right",))
    async with in_process(app) as client:
        for path in pages:
            assert (await client.get(path)).status_code == 200
            assert (await client.head(path)).status_code == 200
            assert (await client.post(path)).status_code == 401
        for path in ("/v1/models", "/openapi.json", "/page/", "/page/scripts", "/page/none.js"):
            assert (await client.get(path)).status_code == 401, path


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/page/../config.py", "/page/%2e%2e/x", "/page/"]
)
async def test_what_is_not_in_the_folder_is_not_found(
    tmp_path: Path, pages: Pages, path: str
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(), pages=pages)) as client:
        refused(await client.get(path), 404)


async def test_without_pages_there_is_nothing(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        for path in ("/", "/docs", "/page/icon.svg"):
            refused(await client.get(path), 404)

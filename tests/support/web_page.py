"""The page in a browser, in front of an engine that a test controls, and steps of its user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triptych
from support.browser import opened
from support.http import FakeEngine, live, make_app
from triptych.core.http.page import read_pages

FOLDER = Path(triptych.__file__).with_name("page")


@contextmanager
def page_of(
    browser: Any, folder: Path, engine: FakeEngine, *, allowed: str = "", **server: Any
) -> Iterator[Any]:
    """The page in front of `engine`."""
    app = make_app(folder, engine, pages=read_pages(FOLDER), **server)
    with live(app) as running, opened(browser, running.url, allowed=allowed) as page:
        yield page


def ask(page: Any, text: str = "hello") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Any) -> Any:
    """The last answer, once it is complete."""
    page.locator(".turn.assistant:not([aria-busy])").last.wait_for()
    return page.locator(".turn.assistant").last


def reopened(page: Any) -> Any:
    """The list of kept chats after a reload."""
    page.reload()
    page.get_by_role("searchbox", name="Search chats").wait_for()
    return page.locator(".chat-link")


def choose(page: Any, title: str, action: str) -> None:
    """Choose an action in the menu of a chat."""
    page.get_by_role("button", name=f"Options of {title}").click()
    page.get_by_role("menuitem", name=action).click()

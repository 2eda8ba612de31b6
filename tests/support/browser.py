"""A real browser for tests of the page: Chromium, if there is one, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
)
_SERIOUS = ("serious", "critical")


def _find_chromium() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """A browser without a window. Skips the test where there is none."""
    executable = _find_chromium()
    if executable is None:
        pytest.skip(f"needs a Chromium: one of {', '.join(NAMES)}, or its path as $CHROMIUM")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=[*_FLAGS, *flags])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, *, allowed: str = "", **context: Any) -> Iterator[Any]:
    """A page of its own, at `url`. What it may not do fails the test.

    That is errors on its console, but for those that match `allowed`, and requests elsewhere.
    """
    faults: list[str] = []
    elsewhere: list[str] = []

    def on_console(message: Any) -> None:
        if message.type == "error" and not (allowed and re.search(allowed, message.text)):
            faults.append(message.text)

    def on_request(request: Any) -> None:
        if not request.url.startswith((url, "blob:", "data:")):
            elsewhere.append(request.url)

    session = browser.new_context(base_url=url, **context)
    page = session.new_page()
    page.set_default_timeout(20_000)
    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", on_request)
    page.goto(url)
    yield page
    session.close()
    assert faults == [], faults
    assert elsewhere == []


def barriers(page: Any) -> list[str]:
    """The serious faults that axe finds on `page` as it is now."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [
        f"{fault['id']}: {node['html']}: {node['failureSummary']}"
        for fault in found
        if fault["impact"] in _SERIOUS
        for node in fault["nodes"]
    ]

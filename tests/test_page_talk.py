"""The talk panel in front of made-up ears and voices: keys, refusals, and a server that leaves.

The microphone is Chromium's own, which beeps. A conversation on real models is in
`live/test_page_talk.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.browser import barriers, chromium, opened
from support.http import live
from support.talk import TalkApp, talk_app
from support.web_page import FOLDER
from triptych.core.http.page import read_pages

REFUSALS = "Failed to load resource|WebSocket connection"
"""In the browser's words. This app has no route for voices either."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@contextmanager
def panel_of(browser: Any, talk: TalkApp) -> Iterator[Any]:
    with live(talk.app) as running, opened(browser, running.url, allowed=REFUSALS) as page:
        page.evaluate("() => { location.hash = 'talk'; }")
        yield page


def start(page: Any) -> None:
    page.get_by_role("button", name="Start talking").click()


def test_beeps_are_heard_and_answered(browser: Any, tmp_path: Path) -> None:
    talk = talk_app(tmp_path, pages=read_pages(FOLDER))
    with panel_of(browser, talk) as page:
        start(page)
        page.locator("#talk-log .user", has_text=talk.ears.words).first.wait_for()
        page.locator("#talk-log .assistant", has_text=talk.chat.answer).first.wait_for()
        assert barriers(page) == []
        page.get_by_role("button", name="End").click()
        assert page.locator("#talk-state").inner_text() == "The conversation has ended."


def test_a_key_is_asked_for(browser: Any, tmp_path: Path) -> None:
    talk = talk_app(tmp_path, pages=read_pages(FOLDER), api_key=("right",))
    with panel_of(browser, talk) as page:
        page.get_by_label("Key", exact=True).fill("right")
        page.get_by_role("button", name="Continue").click()
        page.wait_for_load_state("networkidle")
        page.evaluate("() => sessionStorage.setItem('triptych-key', 'wrong')")
        start(page)
        page.get_by_text("does not accept this key").wait_for()
        page.get_by_label("Key", exact=True).fill("right")
        page.get_by_role("button", name="Continue").click()
        page.get_by_role("button", name="Mute").wait_for()


def test_a_refused_session_says_why(browser: Any, tmp_path: Path) -> None:
    talk = talk_app(tmp_path, pages=read_pages(FOLDER), max_realtime_sessions_per_key=1)
    with panel_of(browser, talk) as page:
        start(page)
        page.get_by_role("button", name="Mute").wait_for()
        url = page.evaluate("location.origin")
        with opened(browser, url, allowed=REFUSALS) as other:
            other.evaluate("() => { location.hash = 'talk'; }")
            start(other)
            assert "This key has 1 sessions open" in other.get_by_role("alert").inner_text()
            assert other.get_by_role("button", name="Start talking").is_enabled()


def test_a_failed_turn_and_a_server_that_leaves_are_sentences(browser: Any, tmp_path: Path) -> None:
    talk = talk_app(tmp_path, pages=read_pages(FOLDER))
    talk.ears.words = "fail"
    with ExitStack() as server:
        url = server.enter_context(live(talk.app)).url
        with opened(browser, url, allowed=REFUSALS) as page:
            page.evaluate("() => { location.hash = 'talk'; }")
            start(page)
            page.locator("#talk-log .error", has_text="gone").first.wait_for()
            server.close()
            page.locator("#talk-error", has_text="The connection was lost.").wait_for()


@pytest.mark.parametrize("missing", ["speech", "transcription"])
def test_a_missing_model_is_explained(browser: Any, tmp_path: Path, missing: str) -> None:
    def without(route: Any) -> None:
        served = route.fetch().json()
        kept = [model for model in served["data"] if model["task"] != missing]
        route.fulfill(json={**served, "data": kept})

    talk = talk_app(tmp_path, pages=read_pages(FOLDER))
    with live(talk.app) as running, opened(browser, running.url, allowed=REFUSALS) as page:
        page.route("**/v1/models", without)
        page.reload()
        page.get_by_role("link", name="Chat").wait_for()
        is_offered = page.get_by_role("link", name="Talk").is_visible()
        assert is_offered == (missing == "speech")
        if is_offered:
            page.get_by_role("link", name="Talk").click()
            page.get_by_text("The server has no speech model: answers are written.").wait_for()

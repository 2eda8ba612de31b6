"""A conversation in a real Chromium, whose microphone is a recording, on the embedded models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import barriers, chromium, opened
from support.http import until
from support.serve_process import Server
from support.spoken_file import microphone_of

QUESTION = "Tell me a long story about a ship."
WATCH = """() => {
    window.planned = [];
    const { start } = AudioBufferSourceNode.prototype;
    AudioBufferSourceNode.prototype.start = function (at) {
        const peak = Math.max(...this.buffer.getChannelData(0).map(Math.abs));
        planned.push({ at, until: at + this.buffer.duration, peak, isStopped: false });
        const piece = planned.at(-1);
        this.disconnect = () => {
            piece.isStopped = this.context.currentTime < piece.until;
            AudioNode.prototype.disconnect.call(this);
        };
        return start.call(this, at);
    };
}"""

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]  # the first start fetches models


@pytest.fixture(scope="module")
def browser(default_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    url = f"http://127.0.0.1:{default_server.port}"
    with chromium(microphone_of(url, QUESTION, tmp_path_factory.mktemp("talk"))) as browser:
        yield browser


@pytest.fixture
def page(browser: Any, default_server: Server) -> Iterator[Any]:
    with opened(browser, f"http://127.0.0.1:{default_server.port}") as page:
        page.get_by_role("link", name="Talk").click()
        yield page


def test_a_question_is_heard_answered_and_the_answer_interrupted(page: Any) -> None:
    page.evaluate(WATCH)
    page.get_by_label("Instructions").fill("Answer with a long story of many sentences.")
    page.get_by_role("button", name="Start talking").click()
    heard = page.locator("#talk-log .turn.user .bubble")
    until(lambda: any("story" in text.lower() for text in heard.all_inner_texts()), timeout_s=60)
    page.get_by_text("Speaking: you can interrupt").wait_for(timeout=60_000)
    assert page.locator("#talk-log .turn.assistant p").first.inner_text().strip()
    assert barriers(page) == []
    page.get_by_text("Interrupted").first.wait_for(timeout=60_000)
    planned = page.evaluate("() => planned")
    assert max(piece["peak"] for piece in planned) > 0.05
    assert any(piece["isStopped"] for piece in planned)
    page.get_by_role("button", name="Mute").click()
    assert page.locator("#talk-mute").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="End").click()
    page.get_by_text("The conversation has ended.").wait_for()
    assert page.locator("#talk-go").evaluate("(button) => button === document.activeElement")


def test_dictation_writes_words_before_it_is_ended(page: Any) -> None:
    page.get_by_role("link", name="Chat").click()
    message = page.get_by_label("Message", exact=True)
    page.get_by_role("button", name="Dictate").click()
    until(lambda: "ship" in message.input_value().lower(), timeout_s=60)
    page.get_by_role("button", name="Stop dictation").click()
    page.get_by_role("button", name="Dictate").and_(page.locator(":enabled")).wait_for()
    assert "story" in message.input_value().lower()


def test_a_missing_microphone_is_a_sentence(page: Any) -> None:
    page.evaluate(
        """() => { navigator.mediaDevices.getUserMedia = () =>
            Promise.reject(new DOMException("none", "NotFoundError")); }"""
    )
    page.get_by_role("button", name="Start talking").click()
    assert "There is no microphone." in page.get_by_role("alert").inner_text()
    assert page.get_by_role("button", name="Start talking").is_enabled()

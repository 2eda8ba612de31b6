"""The page in front of an engine that says what a test wants it to: keys, faults, hostile answers.

That its panels do their jobs on real models is shown in `live/test_page.py`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from support.browser import barriers, chromium, opened
from support.http import FakeEngine, live, make_app
from support.tiers import first
from support.web_page import FOLDER, ask, choose, finished, page_of, reopened
from triptych.core.http.page import read_pages

MAX_LINES = 500
MAX_BYTES = 300_000
HOSTILE = """# Title <b>x</b>

<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">

**bold** and *slanted* and `code <i>` and [a link](https://example.org/a_(b)).

![spy](https://example.org/spy.png) and [bad](javascript:alert(1))

- one
- two
  1. inner

| a | b |
|---|--:|
| 1 | 2 |

> quoted

```python
print("<hi>")
```
"""
SHOW_ONCE = """async (text) => {
    const { showMarkdown } = await import("/page/scripts/markdown/blocks.js");
    const element = document.createElement("div");
    showMarkdown(element, text);
    return element.children.length;
}"""
SHOW_TWICE = """async (text) => {
    const { showMarkdown } = await import("/page/scripts/markdown/blocks.js");
    const whole = document.createElement("div");
    const grown = document.createElement("div");
    for (let end = 0; end <= text.length; end += 1) showMarkdown(grown, text.slice(0, end));
    showMarkdown(whole, text);
    return [whole.innerHTML, grown.innerHTML];
}"""


def sources() -> list[Path]:
    return sorted(path for path in FOLDER.rglob("*") if path.suffix in (".html", ".css", ".js"))


# -- the files -----------------------------------------------------------------------------------


def test_files_are_small_and_load_nothing_from_elsewhere() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < MAX_LINES, path
        assert not re.search(r"(src|href|url|import)\W{1,3}https?:", text), path
    assert sum(path.stat().st_size for path in sources()) < MAX_BYTES


def test_no_text_becomes_markup_or_code() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", text
        )
        assert found is None, path
        if path.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), path


def test_what_the_pages_name_is_there() -> None:
    pages = read_pages(FOLDER)
    for path in sources():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'"/?(page/[^"$]+)"', text):
            assert f"/{name}" in pages, (path, name)
        for name in re.findall(r'url\("([^"]+)"', text):
            assert (path.parent / name).resolve().is_file(), (path, name)
        for name in re.findall(r'from "(\.[^"]+)"', text):
            assert (path.parent / name).resolve().is_file(), (path, name)


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_answers_are_shown_as_text_whatever_they_say(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    engine.answer = HOSTILE
    with page_of(browser, tmp_path, engine) as page:
        ask(page)
        text = finished(page).locator(".markdown").last
        assert text.locator("strong").inner_text() == "bold"
        assert text.locator("em").inner_text() == "slanted"
        assert text.locator("p code").inner_text() == "code <i>"
        assert text.locator("pre code").inner_text() == 'print("<hi>")'
        assert text.locator("ul > li").count() == 2
        assert text.locator("ol > li").inner_text() == "inner"
        assert text.locator("td.end").inner_text() == "2"
        assert text.locator("blockquote").inner_text().strip() == "quoted"
        assert [a.get_attribute("href") for a in text.locator("a").all()] == [
            "https://example.org/a_(b)",
            "https://example.org/spy.png",
        ]
        assert text.locator("script, img, b, i").count() == 0
        assert page.evaluate("window.hacked") is None
        assert barriers(page) == []


def test_markdown_is_the_same_in_pieces_and_at_once(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        whole, grown = page.evaluate(SHOW_TWICE, HOSTILE)
        assert whole == grown
        assert "<table>" in whole


def test_no_text_takes_long(browser: Any, tmp_path: Path, engine: FakeEngine) -> None:
    texts = [
        "*" * 5000 + "x",
        "[" * 9000,
        "`" * 7 + "`` " * 3000,
        "> " * 4000,
        "_a *" * 3000,
        "# a" + " " * 9000 + "b",
        "a | b\n-" + " " * 19000 + "x",
        "```" + " " * 19000 + "`",
        "` " + "a" * 19000 + "`",
        "1. " * 6000,
    ]
    with page_of(browser, tmp_path, engine) as page:
        for text in texts:
            assert page.evaluate(SHOW_ONCE, text) in (1, 2), text[:9]


def test_stop_regenerate_and_edit(browser: Any, tmp_path: Path, engine: FakeEngine) -> None:
    engine.is_endless, engine.step_s = True, 0.01
    with page_of(browser, tmp_path, engine) as page:
        ask(page)
        page.get_by_text("tokens").first.wait_for()
        page.get_by_role("button", name="Stop").click()
        assert "stopped" in finished(page).inner_text()
        engine.is_endless = False
        page.get_by_role("button", name="Regenerate").click()
        assert engine.answer in finished(page).inner_text()
        page.get_by_role("button", name="Edit the message").click()
        page.get_by_label("The message").fill("other words")
        page.get_by_role("button", name="Send again").click()
        assert engine.answer in finished(page).inner_text()
        assert page.locator(".turn").count() == 2
        assert "other words" in page.locator(".turn.user").inner_text()
    assert len(engine.cancelled) == 1


def test_reasoning_is_folded(browser: Any, tmp_path: Path, engine: FakeEngine) -> None:
    deltas = [{"reasoning_content": "Two and **two**"}, {"content": "Four."}]
    events = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    with page_of(browser, tmp_path, engine) as page:
        answered = {"content_type": "text/event-stream", "body": stream}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**answered))
        ask(page)
        turn = finished(page)
        assert "Four." in turn.inner_text()
        assert not turn.locator("strong").is_visible()
        turn.get_by_text("Reasoning").click()
        assert turn.locator("strong").inner_text() == "two"


def test_a_key_is_asked_for_and_kept_for_the_tab(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine, api_key=("right",), allowed="401") as page:
        page.get_by_role("dialog", name="API key").wait_for()
        assert barriers(page) == []
        for given in ("wrong", "right"):
            page.get_by_label("Key", exact=True).fill(given)
            page.get_by_role("button", name="Continue").click()
        ask(page)
        assert engine.answer in finished(page).inner_text()
        page.reload()
        ask(page)
        assert engine.answer in finished(page).inner_text()
        assert page.evaluate("document.cookie.length") == 0
        assert "right" not in page.evaluate("JSON.stringify(localStorage)")
        page.goto("/docs")
        page.get_by_text("/v1/chat/completions", exact=True).wait_for()


def test_errors_say_what_to_do_and_may_be_tried_again(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine, allowed="400") as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("100000")
        ask(page)
        box = page.get_by_role("alert")
        assert "4096" in box.inner_text()
        assert re.search(r"Request req-\w+", box.inner_text())
        page.get_by_label("Max tokens").fill("5")
        page.get_by_role("button", name="Try again").click()
        assert engine.answer[:5] in finished(page).inner_text()
        page.get_by_label("Tools").fill("no json")
        ask(page)
        assert "Tools in the settings is not valid JSON" in page.get_by_role("alert").inner_text()
        assert barriers(page) == []


def test_a_lost_engine_ends_an_answer_with_its_error(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    from triptych.core.errors import Unavailable

    engine.error, engine.num_good = Unavailable("The engine is starting again. Try again."), 9
    with page_of(browser, tmp_path, engine) as page:
        ask(page)
        turn = finished(page)
        assert engine.answer[:9] in turn.inner_text()
        assert "The engine is starting again." in turn.get_by_role("alert").inner_text()


# -- what stays in the browser -------------------------------------------------------------------


def test_chats_are_kept_found_renamed_and_deleted(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        for text in ("about apples", "about boats"):
            page.get_by_role("button", name="New chat").click()
            ask(page, text)
            finished(page)
        kept = reopened(page)
        assert kept.all_inner_texts() == ["about boats", "about apples"]
        assert page.locator(".turn").count() == 0
        kept.last.click()
        assert "about apples" in page.locator(".turn.user").inner_text()
        assert engine.answer in page.locator(".turn.assistant").inner_text()
        choose(page, "about apples", "Rename")
        page.get_by_label("Title of the chat").fill("Fruit")
        page.keyboard.press("Enter")
        assert page.get_by_role("heading", level=1).inner_text() == "Fruit"
        page.get_by_label("Search chats").fill("apples")
        assert kept.all_inner_texts() == ["Fruit"]
        choose(page, "Fruit", "Delete")
        page.get_by_label("Search chats").fill("")
        assert kept.all_inner_texts() == ["about boats"]
        page.get_by_role("button", name="Undo").click()
        kept.nth(1).wait_for()
        assert sorted(reopened(page).all_inner_texts()) == ["Fruit", "about boats"]
        assert barriers(page) == []


def test_a_chat_that_is_left_keeps_the_part_of_its_answer(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    engine.is_endless, engine.step_s = True, 0.01
    with page_of(browser, tmp_path, engine) as page:
        ask(page, "about apples")
        page.locator(".turn.assistant", has_text="The quick").wait_for()
        page.get_by_role("button", name="New chat").click()
        page.locator(".turn").first.wait_for(state="detached")
        page.locator(".chat-link").click()
        assert "The quick" in finished(page).inner_text()
        assert "stopped" in finished(page).inner_text()
        page.get_by_role("button", name="Regenerate").click()
        page.locator(".turn.assistant[aria-busy]", has_text="The quick").wait_for()
        choose(page, "about apples", "Delete")
        page.get_by_text("is deleted.").wait_for()
        page.reload()
        page.get_by_text("Chats stay in this browser only.").wait_for()


def test_a_chat_is_exported(browser: Any, tmp_path: Path, engine: FakeEngine) -> None:
    with page_of(browser, tmp_path, engine) as page:
        ask(page, "about apples")
        finished(page)
        with page.expect_download() as markdown:
            choose(page, "about apples", "Export as Markdown")
        with page.expect_download() as document:
            choose(page, "about apples", "Export as JSON")
        assert markdown.value.suggested_filename == "about-apples.md"
        text = markdown.value.path().read_text(encoding="utf-8")
        chat = json.loads(document.value.path().read_text(encoding="utf-8"))
    assert "## You\n\nabout apples" in text
    assert engine.answer in text
    assert [turn["text"] for turn in chat["turns"]] == ["about apples", engine.answer]


def test_nothing_is_kept_if_the_switch_is_off(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    stored = """async () => {
        const opening = indexedDB.open("triptych");
        await new Promise((resolve) => { opening.onsuccess = resolve; });
        const all = opening.result.transaction("chats").objectStore("chats").count();
        return new Promise((resolve) => { all.onsuccess = () => resolve(all.result); });
    }"""
    with page_of(browser, tmp_path, engine) as page:
        page.get_by_role("switch", name="Keep chats").uncheck()
        ask(page)
        finished(page)
        page.reload()
        page.get_by_text("Nothing is kept").wait_for()
        assert not page.get_by_role("switch", name="Keep chats").is_checked()
        assert page.evaluate(stored) == 0
        page.get_by_role("switch", name="Keep chats").check()
        ask(page)
        finished(page)
        page.locator(".chat-link").wait_for()
        assert page.evaluate(stored) == 1


def test_settings_stay_until_they_are_reset(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("7")
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("System prompt").press("Escape")
        page.reload()
        page.get_by_role("button", name="Settings").click()
        assert page.get_by_label("Max tokens").input_value() == "7"
        assert page.get_by_label("System prompt").input_value() == "Be brief."
        page.get_by_role("button", name="Creative").click()
        assert page.get_by_label("Temperature").input_value() == "1.1"
        page.get_by_role("button", name="Reset").click()
        assert page.get_by_label("Max tokens").input_value() == ""
        assert page.get_by_label("Temperature").input_value() == ""
        page.reload()
        page.get_by_role("button", name="Settings").click()
        assert page.get_by_label("System prompt").input_value() == ""


# -- models --------------------------------------------------------------------------------------


def test_the_model_menu_says_what_a_model_is_and_that_it_loads(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        page.get_by_role("button", name="Model: ").wait_for()
        name = page.locator("#chat-model").input_value()
        loading = {"model": name, "state": "loading", "progress": 0.4, "error": None}
        health = {"status": "ok", "reason": "", "models": [loading]}
        page.route("**/readyz", lambda route: route.fulfill(json=health))
        engine.gate = threading.Event()
        ask(page)
        page.get_by_text(f"{name} is loading: 40 %").wait_for()
        page.get_by_role("button", name=f"Model: {name}, loading 40 %").click()
        entry = page.get_by_role("menuitemradio", name=name)
        assert "Text · 4,096 tokens" in entry.inner_text()
        assert "loading 40 %" in entry.inner_text()
        assert barriers(page) == []
        page.keyboard.press("Escape")
        loading |= {"state": "failed", "error": "overloaded", "message": "There is no room."}
        page.get_by_role("button", name=f"Model: {name}, failed").click()
        assert "There is no room." in entry.inner_text()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Stop").click()


def test_a_request_is_shown_as_code(browser: Any, tmp_path: Path, engine: FakeEngine) -> None:
    with page_of(browser, tmp_path, engine) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("7")
        page.get_by_label("Repetition penalty").fill("1.1")
        page.get_by_label("Message", exact=True).fill('say "it\'s"')
        page.get_by_role("button", name="Code", exact=True).click()
        code = page.locator("#code-body code")
        assert page.evaluate("location.origin") + "/v1/chat/completions" in code.inner_text()
        assert "it'\\''s" in code.inner_text()  # quoted for a shell
        page.get_by_role("tab", name="Python").click()
        written = code.inner_text()
        compile(written, "snippet", "exec")
        assert "max_tokens=7" in written
        assert 'extra_body={"repetition_penalty": 1.1}' in written
        assert barriers(page) == []
        page.get_by_role("tab", name="Python").press("ArrowRight")
        assert 'import OpenAI from "openai"' in code.inner_text()


# -- below a path --------------------------------------------------------------------------------


@contextmanager
def page_below(browser: Any, folder: Path, path: str, *, is_stripped: bool) -> Iterator[Any]:
    """The page as a proxy publishes it below `path`, which the proxy removes if `is_stripped`."""
    root = {} if is_stripped else {"root_path": path}
    app = make_app(folder, FakeEngine(), pages=read_pages(FOLDER), **root)
    if is_stripped:
        app.add_middleware(OnlyBelow, path=path)
    with live(app) as running, opened(browser, f"{running.url}{path}/") as page:
        yield page


class OnlyBelow:
    """A proxy in small: it removes `path`, and has nothing elsewhere."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith(f"{self._path}/"):
            inner = {**scope, "path": scope["path"].removeprefix(self._path)}
            inner["raw_path"] = inner["path"].encode()
            await self._app(inner, receive, send)
        else:
            await Response(status_code=404)(scope, receive, send)


@pytest.mark.parametrize("is_stripped", first([True, False]))
def test_the_page_works_below_a_path(browser: Any, tmp_path: Path, is_stripped: bool) -> None:
    with page_below(browser, tmp_path, "/llm", is_stripped=is_stripped) as page:
        address = page.evaluate("location.origin") + "/llm/v1"
        ask(page)
        assert FakeEngine.answer in finished(page).inner_text()
        page.get_by_role("button", name="Code", exact=True).click()
        for language in ("curl", "Python", "JavaScript"):
            page.get_by_role("tab", name=language).click()
            assert address in page.locator("#code-body code").inner_text()
        page.keyboard.press("Escape")
        page.get_by_role("link", name="API").click()
        page.locator("#about", has_text=address).wait_for()
        page.locator("details.route summary").first.click()
        page.get_by_text(f"curl {address}").first.wait_for()
        page.locator("nav [data-panel=chat]").click()
        page.get_by_label("Message", exact=True).wait_for()
        assert page.url.endswith("/llm/#chat")

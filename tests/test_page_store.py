"""Chats that the page keeps: with the switch off, with keys, in two tabs, without space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import chromium
from support.http import FakeEngine
from support.web_page import ask, choose, finished, page_of, reopened

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def keep(page: Any, is_on: bool) -> None:
    page.get_by_role("switch", name="Keep chats").set_checked(is_on)


def open_with_key(page: Any, key: str) -> None:
    """Open the page with a key that the tab has so far not had."""
    page.evaluate("sessionStorage.clear()")
    page.reload()
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Continue").click()
    page.get_by_label("Message", exact=True).wait_for()


def open_tab(page: Any) -> Any:
    """Another tab of the same browser."""
    tab = page.context.new_page()
    tab.set_default_timeout(20_000)
    tab.goto("/")
    return tab


def test_a_kept_chat_is_renamed_and_restored_while_nothing_new_is_kept(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        ask(page, "about apples")
        finished(page)
        keep(page, False)
        ask(page, "not to be kept")
        page.locator(".turn").nth(3).wait_for()
        finished(page)
        choose(page, "about apples", "Rename")
        page.get_by_label("Title of the chat").fill("Fruit")
        page.keyboard.press("Enter")
        assert page.locator(".chat-link").all_inner_texts() == ["Fruit"]
        assert page.get_by_label("Title of the chat").count() == 0
        choose(page, "Fruit", "Delete")
        page.get_by_role("button", name="Undo").click()
        page.locator(".chat-link").wait_for()
        reopened(page).click()
        assert "about apples" in page.locator(".turn.user").first.inner_text()
        assert page.locator(".turn").count() == 2


def test_a_picture_is_shown_without_an_image_model(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    store = """async (url) => {
        const { chats } = await import("/page/scripts/store.js");
        const turn = { role: "drawing", model: "m", prompt: "a pear", seed: 1, size: "1x1", url };
        await chats.put({ id: "1", title: "Pear", model: "m", updatedMs: 1, turns: [turn] });
    }"""
    with page_of(browser, tmp_path, engine) as page:
        page.evaluate(store, PIXEL)
        reopened(page).click()
        turn = page.locator(".turn.drawing")
        turn.get_by_role("link", name="Download").wait_for()
        assert turn.get_by_role("button").all_inner_texts() == [""]  # the picture
        assert turn.get_by_role("button", name="Draw again").count() == 0


def test_chats_of_a_key_are_not_shown_to_another_key(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    databases = "indexedDB.databases().then((all) => JSON.stringify(all))"
    with page_of(browser, tmp_path, engine, api_key=("one", "two"), allowed="401") as page:
        open_with_key(page, "one")
        ask(page, "about apples")
        finished(page)
        open_with_key(page, "two")
        page.get_by_text("Chats stay in this browser only.").wait_for()
        assert page.locator(".chat-link").count() == 0
        ask(page, "about boats")
        finished(page)
        choose(page, "about boats", "Delete")
        page.get_by_text("is deleted.").wait_for()
        assert "one" not in page.evaluate(databases)
        open_with_key(page, "one")
        page.locator(".chat-link").wait_for()
        assert page.locator(".chat-link").all_inner_texts() == ["about apples"]


def test_nothing_is_kept_with_a_key_on_an_insecure_page(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine, api_key=("one",), allowed="401") as page:
        page.add_init_script("Object.defineProperty(crypto, 'subtle', { value: undefined });")
        open_with_key(page, "one")
        page.get_by_text("with an API key, this needs HTTPS").wait_for()
        assert page.get_by_role("switch", name="Keep chats").is_disabled()
        assert not page.get_by_role("switch", name="Keep chats").is_checked()
        ask(page)
        assert engine.answer in finished(page).inner_text()
        assert page.locator(".chat-link").count() == 0


def test_tabs_follow_each_other(browser: Any, tmp_path: Path, engine: FakeEngine) -> None:
    with page_of(browser, tmp_path, engine) as page:
        other = open_tab(page)
        ask(page, "about apples")
        finished(page)
        other.locator(".chat-link").click()
        ask(page, "and pears")
        other.locator(".turn.user", has_text="and pears").wait_for()
        finished(page)
        other.locator(".turn.assistant", has_text=engine.answer).nth(1).wait_for()
        ask(other, "and plums")
        page.locator(".turn.user", has_text="and plums").wait_for()
        assert page.locator(".turn.user").count() == 3
        other.get_by_role("button", name="New chat").click()
        ask(other, "about boats")
        finished(other)
        page.locator(".chat-link").nth(1).wait_for()
        other.get_by_role("button", name="All chats").click()
        other.get_by_role("menuitem", name="Delete all chats").click()
        page.get_by_text("Chats stay in this browser only.").wait_for()
        page.locator(".turn").first.wait_for(state="detached")
        other.get_by_role("button", name="Undo").click()
        page.locator(".chat-link").nth(1).wait_for()
        assert reopened(page).all_inner_texts() == ["about boats", "about apples"]


def test_answers_of_two_tabs_to_one_chat_are_both_kept(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        ask(page, "about apples")
        finished(page)
        other = open_tab(page)
        other.locator(".chat-link").click()
        engine.is_endless, engine.step_s = True, 0.01
        ask(page, "and pears")
        other.locator(".turn.user", has_text="and pears").wait_for()
        ask(other, "and plums")
        page.locator(".chat-link").nth(1).wait_for()
        for tab in (page, other):
            tab.get_by_role("button", name="Stop").click()
            assert "stopped" in finished(tab).inner_text()
        last_words = set()
        for index in range(reopened(page).count()):
            page.locator(".chat-link").nth(index).click()
            last_words.add(page.locator(".turn.user").last.inner_text().strip())
        assert last_words == {"and pears", "and plums"}


def test_a_full_browser_is_named_until_there_is_space(
    browser: Any, tmp_path: Path, engine: FakeEngine
) -> None:
    with page_of(browser, tmp_path, engine) as page:
        origin = page.evaluate("location.origin")
        devtools = page.context.new_cdp_session(page)
        devtools.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": 1})
        ask(page, "about apples")
        finished(page)
        page.get_by_text("There is no space for this chat.").wait_for()
        devtools.send("Storage.overrideQuotaForOrigin", {"origin": origin})
        ask(page, "and pears")
        page.get_by_text("There is no space for this chat.").wait_for(state="detached")
        finished(page)
        assert reopened(page).all_inner_texts() == ["about apples"]

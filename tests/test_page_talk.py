"""Talk and dictation in front of made-up ears and voices: keys, refusals, a server that leaves.

The microphone is Chromium's own, which beeps. A conversation on real models is in
`live/test_page_talk.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.browser import barriers, chromium, opened
from support.http import live, until
from support.talk import KnowingTranscriber, TalkApp, talk_app
from support.tiers import first
from support.web_page import FOLDER
from triptych.core.http.page import read_pages
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.talk.ports import HEARING_RATE

REFUSALS = "Failed to load resource|WebSocket connection"
"""In the browser's words. This app has no route for voices either."""
ENOUGH = HEARING_RATE // 5
"""Samples: twice the least of a turn, since the session's clock lags."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@contextmanager
def panel_of(browser: Any, talk: TalkApp) -> Iterator[Any]:
    with live(talk.app) as running, opened(browser, running.url, allowed=REFUSALS) as page:
        page.evaluate("() => { location.hash = 'talk'; }")
        yield page


INTERRUPTED = """async () => {
    const { Conversation } = await import("/page/scripts/talk/conversation.js");
    const sent = [];
    const socket = { send: (text) => sent.push(JSON.parse(text)), close() {} };
    const log = { add() {} };
    const talk = new Conversation(socket, log, {}, () => {});
    const tell = (type, fields) =>
        socket.onmessage({ data: JSON.stringify({ type, item_id: "item", ...fields }) });
    const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
    const look = () => [talk.state, talk.player.isPlaying, talk.player.positionS];
    const delta = btoa("\\0".repeat(48000 * 10)); // ten seconds
    tell("response.output_audio.delta", { delta });
    while (!talk.player.positionS) await pause(5);
    tell("input_audio_buffer.speech_suspected");
    const held = look();
    await pause(20);
    const later = look();
    tell("input_audio_buffer.speech_dismissed");
    while (talk.player.positionS <= held[2]) await pause(5);
    const resumed = look();
    tell("input_audio_buffer.speech_suspected");
    const again = look();
    tell("response.output_audio.delta", { delta }); // arrives meanwhile
    tell("input_audio_buffer.speech_started");
    const last = sent.at(-1);
    tell("response.output_audio.delta", { item_id: "next", delta });
    const next = look();
    talk.close();
    return { held, later, resumed, again, last, next };
}"""
"""A conversation whose server is this script."""


def test_an_answer_is_held_while_speech_is_suspected(browser: Any, tmp_path: Path) -> None:
    with panel_of(browser, talk_app(tmp_path, pages=read_pages(FOLDER))) as page:
        found = page.evaluate(INTERRUPTED)
    speaking = "Speaking: you can interrupt"
    assert found["held"] == [speaking, False, found["later"][2]] == found["later"]
    assert found["resumed"][:2] == [speaking, True]
    assert found["again"][:2] == [speaking, False]
    heard_ms = int(found["again"][2] * 1000)
    assert found["last"]["type"] == "conversation.item.truncate"
    assert found["last"]["audio_end_ms"] == heard_ms > int(found["held"][2] * 1000)
    assert found["next"][1], "the next answer is not held"


LOST = """async () => {
    const { Conversation } = await import("/page/scripts/talk/conversation.js");
    const { TalkLog } = await import("/page/scripts/talk/log.js");
    const place = document.getElementById("talk-log");
    const log = new TalkLog(place);
    for (let turn = 0; turn < 40; turn += 1) log.add(turn, "user", "Hello");
    place.scrollTop = 0;
    log.add("last", "user", "Hello");
    const isLeft = place.scrollTop === 0;
    log.clear();
    const socket = { readyState: 1, bufferedAmount: 0, send() {}, close() {} };
    const ends = [];
    const talk = new Conversation(socket, log, {}, (error) => ends.push(error.message));
    talk.hear(new Float32Array(480));
    const before = ends.length;
    socket.bufferedAmount = 1e6; // a connection that takes nothing any more
    talk.hear(new Float32Array(480));
    socket.onclose({ reason: "" });
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (asked) => (window.stream = await ask(asked));
    return { isLeft, before, ends, live: place.ariaLive };
}"""


def test_a_stalled_connection_and_a_lost_microphone_end_it(browser: Any, tmp_path: Path) -> None:
    with panel_of(browser, talk_app(tmp_path, pages=read_pages(FOLDER))) as page:
        found = page.evaluate(LOST)
        assert found.pop("ends")[0].startswith("The connection was lost.")
        assert found == {"isLeft": True, "before": 0, "live": "off"}
        start(page)
        page.get_by_role("button", name="Mute").wait_for()
        page.evaluate("() => stream.getTracks()[0].dispatchEvent(new Event('ended'))")
        page.get_by_role("alert").get_by_text("The microphone is gone.").wait_for()
        assert page.get_by_role("button", name="Start talking").is_enabled()
        page.evaluate(
            """() => { navigator.mediaDevices.getUserMedia = () =>
                Promise.reject(new DOMException("busy", "NotReadableError")); }"""
        )
        start(page)
        page.get_by_role("alert").get_by_text("gives no sound").wait_for()


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


@pytest.mark.parametrize("part", first(["AnalyserNode", "MediaStreamAudioSourceNode"]))
def test_a_microphone_that_cannot_be_used_is_closed(
    browser: Any, tmp_path: Path, part: str
) -> None:
    broken = f"""() => {{
        const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (asked) => (window.stream = await ask(asked));
        const fail = function () {{ throw new Error("no more sound"); }};
        if ("{part}" === "AnalyserNode") window.AnalyserNode = fail;
        else AudioContext.prototype.createMediaStreamSource = fail;
    }}"""
    talk = talk_app(tmp_path, pages=read_pages(FOLDER))
    with (
        live(talk.app) as running,
        opened(browser, running.url, allowed=f"{REFUSALS}|no more sound") as page,
    ):
        page.evaluate(broken)
        page.get_by_role("button", name="Dictate").click()
        page.get_by_role("alert").get_by_text("no more sound").wait_for()
        assert page.evaluate("stream.getTracks()[0].readyState") == "ended"


def hear_early(self: KnowingTranscriber, pcm_S: Pcm) -> None:
    """Tell the words once there is enough sound for a turn."""
    had_enough = self.num_heard >= ENOUGH
    self.num_heard += len(pcm_S)
    if self.num_heard >= ENOUGH and not had_enough:
        self.pieces.put_nowait("hello their")


STOPPED_TWICE = """async () => {
    const { listen } = await import("/page/scripts/talk/live_text.js");
    let begin;
    const begun = new Promise((resolve) => (begin = resolve));
    const live = await listen(document.getElementById("hear-model").value, begin);
    await begun;
    live.stop(); // as where the microphone is taken away
    live.stop();
    return live.text;
}"""


def test_a_dictation_that_is_stopped_twice_waits_for_its_final_text(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = KnowingTranscriber.finish

    async def finish_late(self: KnowingTranscriber) -> str:
        await asyncio.sleep(0.2)
        return await finish(self)

    monkeypatch.setattr(KnowingTranscriber, "push", hear_early)
    monkeypatch.setattr(KnowingTranscriber, "finish", finish_late)
    with panel_of(browser, talk_app(tmp_path, pages=read_pages(FOLDER))) as page:
        assert page.evaluate(STOPPED_TWICE) == "Hello there"


def test_dictation_writes_at_the_cursor_while_it_is_spoken(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnowingTranscriber, "push", hear_early)
    talk = talk_app(tmp_path, pages=read_pages(FOLDER))
    with live(talk.app) as running, opened(browser, running.url, allowed=REFUSALS) as page:
        message = page.get_by_label("Message", exact=True)
        message.fill("Say: now")
        message.evaluate("input => input.setSelectionRange(4, 4)")
        for words, expected in (
            ("Hello there", "Say: Hello there now"),
            ("fail", "Say: Hello there hello their now"),  # the words so far are kept
        ):
            talk.ears.words = words
            page.get_by_role("button", name="Dictate").click()
            until(lambda: "hello their" in message.input_value())
            assert not message.is_editable()
            message.press("Enter")  # sends nothing: more words follow
            page.get_by_role("button", name="Stop dictation").click()
            page.get_by_role("button", name="Dictate").and_(page.locator(":enabled")).wait_for()
            assert message.input_value() == expected
            assert message.is_editable()
        assert "gone" in page.get_by_role("alert").inner_text()

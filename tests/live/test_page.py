"""Each panel of the page does its job on the embedded models, in a real Chromium."""

from __future__ import annotations

import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from support.browser import barriers, chromium, opened
from support.http import until
from support.serve_process import Server

PANELS = ("chat", "talk", "speech", "images", "embeddings", "timeline")
SENTENCE = "The morning train to London leaves at seven."
DESK = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]  # the first start fetches models


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def url(browser: Any, default_server: Server) -> str:
    return f"http://127.0.0.1:{default_server.port}"


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url, viewport=DESK) as page:
        page.locator("nav a:not([hidden])").first.wait_for()
        yield page


def go(page: Any, panel: str) -> None:
    page.evaluate("(name) => { location.hash = name; }", panel)
    page.locator(f"#{panel}").wait_for()


def set_fields(page: Any, **fields: object) -> None:
    for name, value in fields.items():
        page.locator(f"#{name.replace('_', '-')}").fill(str(value))


def pixels(image: Any) -> np.ndarray:
    """What an image on the page shows."""
    width, height, data = image.evaluate(
        """(image) => {
            const { naturalWidth: width, naturalHeight: height } = image;
            const context = new OffscreenCanvas(width, height).getContext("2d");
            context.drawImage(image, 0, 0);
            return [width, height, [...context.getImageData(0, 0, width, height).data]];
        }"""
    )
    return np.array(data).reshape(height, width, 4)[..., :3]


def test_chat_answers_and_counts(page: Any) -> None:
    go(page, "chat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    page.get_by_role("button", name="Send").click()
    page.locator(".turn.assistant:not([aria-busy])").wait_for()
    assert "Paris" in page.locator(".turn.assistant").inner_text()
    assert re.search(r"\d+ tokens · [\d.]+ per second", page.locator(".stats").inner_text())


def test_chat_shows_a_call_and_takes_its_result(page: Any) -> None:
    go(page, "chat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(
        '[{"type": "function", "function": {"name": "get_time", "strict": true, "parameters":'
        ' {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},'
        ' "required": ["city"], "additionalProperties": false}}}]'
    )
    page.get_by_label("Tool choice").select_option("required")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("Message", exact=True).fill("What time is it in Paris?")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant:not([aria-busy])").wait_for()
    call = page.locator("details.call").first
    assert "get_time" in call.locator("summary").inner_text()
    call.locator("summary").click()
    assert re.search(r'"city": "(Paris|Rome)"', call.inner_text())
    page.get_by_label("Tool choice").select_option("none")
    for result in page.get_by_label("Result of get_time").all():
        result.fill("12:30")
    page.get_by_role("button", name="Continue").click()
    page.locator(".turn.assistant:not([aria-busy])").nth(1).wait_for()
    assert page.locator(".turn.assistant .markdown").last.inner_text()


def test_an_image_is_asked_about(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    Image.new("RGB", (96, 96), (220, 20, 20)).save(file)
    go(page, "chat")
    page.locator("#chat-file").set_input_files(file)
    page.locator("#chat-images img").wait_for()
    assert page.locator("#chat-model").input_value() == "triptych-vision"
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Message", exact=True).fill("What colour is it?")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant:not([aria-busy])").wait_for()
    assert page.locator(".turn.user img").count() == 1
    assert page.locator(".turn.assistant .markdown").last.inner_text().strip()


def test_what_is_spoken_plays_and_is_written_down(page: Any) -> None:
    go(page, "speech")
    set_fields(page, speak_text=SENTENCE)
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_role("link", name="Download as WAV").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download as WAV").click()
    with wave.open(str(download.value.path())) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (24000, 1)
        assert sound.getnframes() > 24000
    slider = page.get_by_role("slider", name="Position in the speech")
    # Not `wait_for_function`: it evaluates strings in the page, whose policy forbids that.
    until(lambda: float(slider.get_attribute("aria-valuenow") or 0) > 0.2)
    slider.press("Home")
    assert float(slider.get_attribute("aria-valuemax")) > 1
    page.get_by_role("button", name="Use generated speech").click()
    words = page.locator(".word")
    words.first.wait_for()
    heard = " ".join(words.all_inner_texts()).lower()
    assert "train to london" in heard
    words.first.focus()
    page.keyboard.press("ArrowRight")
    assert words.nth(1).evaluate("(word) => word === document.activeElement")
    page.get_by_text("London").last.click()
    hear = page.locator("#hear-audio")
    until(lambda: hear.evaluate("(audio) => audio.currentTime > 0.5"))


def test_a_recording_is_transcribed(page: Any) -> None:
    go(page, "speech")
    page.get_by_role("button", name="Record").click()
    page.get_by_text("Recording", exact=True).wait_for()
    page.wait_for_timeout(700)
    page.get_by_role("button", name="Stop and transcribe").click()
    page.get_by_text(re.compile(r"s of audio in|silen")).wait_for()  # Chromium's microphone beeps


def test_images_are_drawn_with_previews_and_edited(page: Any) -> None:
    go(page, "images")
    set_fields(page, image_prompt="a red apple", image_steps=8, image_seed=1)
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator("figure .generating img:visible").wait_for()  # a preview
    page.get_by_role("button", name="Use seed 1 again").wait_for()
    first = pixels(page.locator("figure img"))
    assert first.std() > 10
    page.get_by_role("button", name="Edit this image").click()
    paint = page.get_by_role("img", name="Mask over the image")
    box = paint.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 20, steps=4)
    page.mouse.up()
    painted = "(canvas) => canvas.getContext('2d').getImageData(64, 64, 1, 1).data[3]"
    assert paint.evaluate(painted) == 0
    paint.press(" ")  # the brush is in the middle
    assert paint.evaluate(painted) > 0
    set_fields(page, image_prompt="a blue car", image_strength=1)
    page.get_by_role("button", name="Generate edit").click()
    page.get_by_text("Generated in").wait_for()
    second = pixels(page.locator("figure img").first)
    changed = np.abs(first - second).max(-1)
    middle = slice(56, 72)  # painted over the apple; the strip above it stays ground
    assert changed[middle, middle].mean() > 10 * changed[-32:].mean()


def test_a_good_image_takes_away_what_was_wrong_with_the_one_before(
    page: Any, tmp_path: Path
) -> None:
    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    bad.write_bytes(b"no image")
    Image.new("RGB", (100, 57), (220, 20, 20)).save(good)
    go(page, "images")
    page.locator("#image-file").set_input_files(bad)
    error = page.locator("#image-status [role=alert]")
    error.wait_for()
    assert not page.locator("#image-source").is_visible()
    page.locator("#image-file").set_input_files(good)
    page.locator("#image-source").wait_for()
    assert error.count() == 0
    set_fields(page, image_prompt="a red apple", image_steps=2)
    page.get_by_role("button", name="Generate edit").click()
    page.get_by_text("Generated in").wait_for()
    shown = pixels(page.locator("figure img").first)
    assert shown.shape[1] / shown.shape[0] == pytest.approx(100 / 57, rel=0.01)


def test_similarity_is_a_table(page: Any) -> None:
    go(page, "embeddings")
    set_fields(page, embed_texts="a cat sleeps\na kitten naps\nstock prices fell")
    page.get_by_role("button", name="Compare").click()
    cells = page.locator("#embed-result tbody td")
    cells.first.wait_for()
    values = np.array([float(text) for text in cells.all_inner_texts()]).reshape(3, 3)
    assert values[0, 1] > values[0, 2]
    assert np.allclose(values, values.T)
    assert np.allclose(np.diag(values), 1)


def test_the_timeline_shows_the_steps_of_a_request(page: Any) -> None:
    go(page, "embeddings")
    go(page, "timeline")
    page.locator(".lane").first.wait_for()
    assert page.locator(".lane").count() >= 5
    go(page, "embeddings")
    page.get_by_role("button", name="Compare").click()
    go(page, "timeline")
    page.locator("#timeline details summary").click()
    page.get_by_role("button", name="Pause").wait_for()
    ask = """async () => (await fetch("/v1/embeddings", {method: "POST",
        headers: {"Content-Type": "application/json"},
        body: JSON.stringify({model: "all-minilm-l6-v2", input: "a cat"})})).status"""
    page.locator(".facts").get_by_text("ready").wait_for()
    page.wait_for_timeout(300)
    assert page.evaluate(ask) == 200
    page.get_by_role("cell", name="embed").first.wait_for()
    assert "MiB" in page.locator(".owners").inner_text()


def test_an_idle_timeline_offers_a_demo(page: Any) -> None:
    go(page, "timeline")
    page.get_by_label("Time shown").select_option("5")
    page.get_by_role("button", name="Run a demo").click()
    page.locator("#timeline details summary").click()
    for kind in ("decode", "denoise", "embed"):
        page.get_by_role("cell", name=kind).first.wait_for()
    assert not page.get_by_role("button", name="Run a demo").is_visible()


# -- one visitor's path --------------------------------------------------------------------------


def answer(page: Any, number: int) -> str:
    turn = page.locator(".turn.assistant:not([aria-busy])").nth(number)
    turn.wait_for()
    return str(turn.locator(".markdown").last.inner_text())


def test_a_visitor_asks_hears_draws_and_looks(page: Any) -> None:
    page.get_by_role("region", name="Ask").get_by_role("button").first.click()
    page.get_by_role("button", name="Read aloud").click()
    time = page.locator(".aloud .time")
    until(lambda: re.match(r"[1-9][\d.]* / [\d.]+ s", time.inner_text()))  # it sounds
    page.get_by_role("button", name="Stop reading", exact=True).click()
    time.wait_for(state="detached")
    page.get_by_role("button", name="Draw this").click()
    first_sentence = page.get_by_label("What to draw").input_value()
    assert re.fullmatch(r"[^.!?]+[.!?]", first_sentence)
    page.get_by_label("What to draw").fill("a red apple")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Ask about this picture").click()
    page.locator("#chat-images img").wait_for()
    page.get_by_label("Message", exact=True).fill("What color is it?")
    page.keyboard.press("Enter")
    page.locator(".turn.user img").wait_for()
    assert "red" in answer(page, 1).lower()
    page.reload()
    page.locator(".chat-link").click()
    assert page.locator(".turn").count() == 5
    assert pixels(page.locator(".drawn img")).std() > 10


def test_each_card_is_one_click(page: Any) -> None:
    page.get_by_role("region", name="Look").get_by_role("button").first.click()
    assert "penguin" in answer(page, 0).lower()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("region", name="Speak").get_by_role("button").first.click()
    page.get_by_role("link", name="Download as WAV").wait_for()
    go(page, "chat")
    page.get_by_role("region", name="Draw").get_by_role("button").first.click()
    page.get_by_text("Generated in").wait_for()
    assert page.locator("#image-results figure").count() == 4


def test_dictation_writes_at_the_cursor(page: Any, url: str, tmp_path: Path) -> None:
    spoken = httpx.post(
        f"{url}/v1/audio/speech",
        json={"model": "triptych-voice", "input": SENTENCE, "response_format": "wav"},
        timeout=60,
    )
    file = tmp_path / "said.wav"
    file.write_bytes(spoken.content)
    message = page.get_by_label("Message", exact=True)
    message.fill("Translate:")
    page.locator("#chat-sound").set_input_files(file)
    until(lambda: "train to london" in message.input_value().lower())
    assert message.input_value().startswith("Translate: ")
    page.get_by_role("button", name="Dictate").click()
    page.get_by_text("Listening").wait_for()
    page.wait_for_timeout(700)
    page.get_by_role("button", name="Stop dictation").click()  # Chromium's microphone beeps
    page.get_by_role("button", name="Dictate").wait_for()


def test_dictation_opens_a_file_where_there_is_no_microphone(page: Any) -> None:
    page.evaluate("() => { navigator.mediaDevices.getUserMedia = () => Promise.reject(); }")
    page.get_by_role("button", name="Dictate").click()
    assert "choose a recording" in page.get_by_role("alert").inner_text()
    with page.expect_file_chooser():
        page.get_by_role("button", name="Dictate").click()


def test_pictures_fill_the_screen_and_stay(page: Any) -> None:
    go(page, "images")
    set_fields(page, image_prompt="a red apple", image_steps=4, image_count=2)
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("Generated in").wait_for()
    page.get_by_role("button", name="Full screen").first.click()
    viewer = page.get_by_role("dialog")
    shown = viewer.locator("#viewer-image")
    first = shown.get_attribute("src")
    page.keyboard.press("ArrowRight")
    assert shown.get_attribute("src") != first
    assert barriers(page) == []
    with page.expect_download() as download:
        viewer.get_by_role("link", name="Download").click()
    with Image.open(download.value.path()) as picture:
        assert picture.size == (128, 128)
    page.keyboard.press("Escape")
    page.reload()
    page.locator("#image-results figure").nth(1).wait_for()
    assert page.locator("#image-steps").input_value() == "4"


def test_sizes_are_a_menu(page: Any) -> None:
    go(page, "images")
    sizes = page.locator("#image-shape")
    assert re.search("auto .128 . 128.", sizes.inner_text())
    sizes.select_option("160x96")
    set_fields(page, image_steps=2)
    page.get_by_role("button", name="Generate", exact=True).click()
    page.get_by_text("Generated in").wait_for()
    assert pixels(page.locator("figure img")).shape[:2] == (96, 160)


def test_the_python_code_of_each_panel_runs(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page.goto("/docs")
    page.get_by_role("tab", name="Python").click()
    for task in ("Speech", "Transcription", "Chat", "Images", "Embeddings"):
        page.get_by_role("tab", name=task).click()
        code = page.locator("#quick-code code").inner_text().replace("recording.wav", "speech.wav")
        exec(compile(code, task, "exec"), {})
    assert (tmp_path / "picture.png").stat().st_size > 1000
    page.get_by_role("button", name="Send").click()  # the embeddings
    assert "384 numbers" in page.locator(".code-answer code").inner_text()


def test_the_reference_names_every_field(page: Any) -> None:
    page.goto("/docs")
    page.get_by_label("Find a route or a field").fill("seed chat")
    page.get_by_text(re.compile(r"^\d of \d+ routes$")).wait_for()
    route = page.locator("details.route:visible").first
    assert "/v1/chat/completions" in route.inner_text()
    route.locator("summary").first.click()
    route.get_by_role("rowheader", name="messages required").wait_for()
    assert "curl" in route.locator("pre").inner_text()
    assert barriers(page) == []


@pytest.mark.parametrize(("scheme", "size"), [("light", DESK), ("dark", PHONE)])
def test_panels_have_no_barriers(browser: Any, url: str, scheme: str, size: dict[str, int]) -> None:
    with opened(browser, url, viewport=size, color_scheme=scheme) as page:
        for panel in PANELS:
            go(page, panel)
            if panel == "embeddings":
                page.get_by_role("button", name="Compare").click()
                page.locator("#embed-result table").wait_for()
            assert barriers(page) == []
            width = page.locator("main").evaluate("(main) => main.scrollWidth")
            assert width <= page.locator("main").evaluate("(main) => main.clientWidth"), panel

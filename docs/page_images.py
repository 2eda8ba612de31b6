"""Make the images of docs/page.md and of the README from a running server.

PYTHONPATH=tests python docs/page_images.py http://127.0.0.1:8000 [SCENE ...]

Owns the scene of each image. Needs a Chromium, Playwright and a server of all embedded models. The
scene `examples` draws the pictures that the page itself shows.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

import triptych
from support.browser import chromium, opened
from support.spoken_file import microphone_of

IMAGES = Path(__file__).with_name("images")
PICTURES = Path(triptych.__file__).with_name("page") / "pictures"
DESK = {"width": 1280, "height": 860}
TALL = {"width": 1280, "height": 940}
FILM = {"width": 1180, "height": 740}
PHONE = {"width": 390, "height": 844}
GAP = 24
SLOW_MS = 60_000

EXAMPLES = {  # of the page, with seeds that turned out well
    "penguin": ("a penguin next to a house", 5),
    "apple": ("a red apple", 19),
    "frogs": ("two green frogs", 5),
    "sunflower": ("a sunflower", 9),
    "rocket": ("a rocket", 8),
    "car": ("a blue car", 7),
}
QUESTION = "Describe an apple in one sentence."
EARLIER = ("Write a Python function that reverses a string.", "What is the capital of France?")
ASKED = "Tell me a long story about a ship."
SPOKEN = "Once upon a time, a small machine learned to speak. Every evening it told a story."

FILM_S = 7.2
FRAME_S = 0.09
FILM_WIDTH = 1000


@contextmanager
def page_of(browser: Any, url: str, size: dict[str, int], scheme: str = "light") -> Iterator[Any]:
    """The page, which draws the same pictures at each visit."""
    phone = {"has_touch": True, "is_mobile": True} if size is PHONE else {}
    with opened(browser, url, viewport=size, color_scheme=scheme, **phone) as page:
        _, seed = EXAMPLES["apple"]
        page.add_init_script(f"Math.random = () => {seed + 0.5} / 1e6")
        page.reload()
        page.locator("#chat-model + button").wait_for()
        page.wait_for_timeout(500)
        yield page


def shot(page: Any) -> Image.Image:
    """The page as it is now."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def save(image: Image.Image, name: str) -> None:
    """Write a small file."""
    path = IMAGES / f"page_{name}.webp"
    image.save(path, quality=86, method=6)
    print(path, path.stat().st_size // 1000, "kB")


def go(page: Any, panel: str) -> None:
    """Show a panel."""
    page.evaluate("(name) => { location.hash = name; }", panel)
    page.locator(f"#{panel}").wait_for()


# -- scenes --------------------------------------------------------------------------------------


def home(page: Any) -> None:
    """The start of a chat."""


def ask(page: Any, text: str, number: int = 0, delay_ms: int = 0) -> None:
    """Send a message, and wait for its answer."""
    message = page.get_by_label("Message", exact=True)
    message.fill("")
    message.press_sequentially(text, delay=delay_ms)
    page.keyboard.press("Enter")
    page.locator(".turn.assistant:not([aria-busy])").nth(number).wait_for(timeout=SLOW_MS)


def be_exact(page: Any) -> None:
    """Let the model take the likeliest token."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Temperature").press("Escape")


def draw(page: Any) -> None:
    """Draw a picture below the answer."""
    page.get_by_role("button", name="Draw this").first.click()
    page.get_by_label("What to draw").fill(EXAMPLES["apple"][0])
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_role("button", name="Full screen").wait_for(timeout=SLOW_MS)


def look(page: Any) -> None:
    """Ask about the picture."""
    page.get_by_role("button", name="Ask about this picture").click()
    page.locator("#chat-images img").wait_for()
    page.wait_for_timeout(400)
    page.keyboard.press("Enter")
    page.locator(".turn.assistant:not([aria-busy])").nth(1).wait_for(timeout=SLOW_MS)


def chat(page: Any) -> None:
    """A question, a picture of the answer, a question about the picture, and the answer's sound."""
    be_exact(page)
    for text in EARLIER:
        ask(page, text)
        page.get_by_role("button", name="New chat").click()
    ask(page, QUESTION)
    draw(page)
    look(page)
    page.get_by_role("button", name="Read aloud").first.click()
    page.locator(".aloud .time", has_text="/").wait_for(timeout=SLOW_MS)
    page.wait_for_timeout(1600)
    page.locator("#chat-log").evaluate("(log) => log.scrollTo(0, log.scrollHeight)")


def speech(page: Any) -> None:
    """Speak a text, and transcribe it."""
    go(page, "speech")
    page.locator("#speak-text").fill(SPOKEN)
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_role("button", name="Use generated speech").click(timeout=SLOW_MS)
    page.locator(".word").first.wait_for(timeout=SLOW_MS)
    page.wait_for_timeout(1500)


def talk(page: Any) -> None:
    """Ask by voice, and interrupt the answer by the next question."""
    go(page, "talk")
    page.get_by_label("Instructions").fill("Answer with a long story of many sentences.")
    page.get_by_role("button", name="Start talking").click()
    page.get_by_text("Interrupted").wait_for(timeout=SLOW_MS)
    page.get_by_text("Speaking: you can interrupt").wait_for(timeout=SLOW_MS)
    page.wait_for_timeout(2500)


def images(page: Any) -> None:
    """Draw the examples, one after the other."""
    go(page, "images")
    for prompt, seed in reversed(EXAMPLES.values()):
        page.locator("#image-prompt").fill(prompt)
        page.locator("#image-seed").fill(str(seed))
        page.locator("#image-go").click()
        page.get_by_text("Generating").wait_for()
        page.get_by_text("Generated in").wait_for(timeout=SLOW_MS)
    page.mouse.move(5, 5)


def timeline(page: Any) -> None:
    """Let the engine do several things at once."""
    go(page, "timeline")
    page.locator(".lane").first.wait_for()
    page.wait_for_timeout(500)
    page.locator("#timeline-demo").evaluate("(button) => button.click()")
    page.wait_for_timeout(8500)


SCENES: dict[str, Callable[[Any], None]] = {
    "home": home,
    "chat": chat,
    "talk": talk,
    "speech": speech,
    "images": images,
    "timeline": timeline,
}


def phones(browser: Any, url: str) -> None:
    """Three scenes on a phone, in a row."""
    shots = []
    for scene in (home, chat, timeline):
        with page_of(browser, url, PHONE, "dark") as page:
            scene(page)
            shots.append(shot(page))
    width = len(shots) * (PHONE["width"] + GAP) - GAP
    row = Image.new("RGB", (width, PHONE["height"]), "white")
    for index, image in enumerate(shots):
        row.paste(image, (index * (PHONE["width"] + GAP), 0))
    save(row, "phone")


def examples(url: str) -> None:
    """Draw the pictures that the page shows."""
    for name, (prompt, seed) in EXAMPLES.items():
        body = {"prompt": prompt, "seed": seed, "output_format": "webp", "output_compression": 90}
        reply = httpx.post(f"{url}/v1/images/generations", json=body, timeout=60)
        content = base64.b64decode(reply.json()["data"][0]["b64_json"])
        (PICTURES / f"{name}.webp").write_bytes(content)


# -- the film ------------------------------------------------------------------------------------


class Film:
    """Frames of a page, with their times in seconds, as Chromium renders them."""

    def __init__(self, page: Any) -> None:
        self.frames: list[tuple[float, bytes]] = []
        self._is_open = True
        self._session = page.context.new_cdp_session(page)
        self._session.on("Page.screencastFrame", self._take)
        self._session.send("Page.startScreencast", {"format": "png"})

    def _take(self, frame: dict[str, Any]) -> None:
        self.frames.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
        if self._is_open:
            self._session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    def close(self) -> None:
        """End the recording."""
        self._is_open = False
        self._session.send("Page.stopScreencast")
        self._session.detach()

    def save(self, path: Path) -> None:
        """Write the frames, faster or slower, so that the film lasts `FILM_S`."""
        begin_s, end_s = self.frames[0][0], self.frames[-1][0]
        num = round(FILM_S / FRAME_S)
        shown: list[bytes] = []
        for index in range(num):
            at_s = begin_s + (end_s - begin_s) * index / (num - 1)
            shown.append([content for taken_s, content in self.frames if taken_s <= at_s][-1])
        height = FILM["height"] * FILM_WIDTH // FILM["width"]
        first, *rest = (
            Image.open(io.BytesIO(content)).convert("RGB").resize((FILM_WIDTH, height))
            for content in shown
        )
        duration_ms = [round(FRAME_S * 1000)] * (num - 1) + [1500]
        options = {"lossless": True, "method": 4, "minimize_size": True, "loop": 0}
        first.save(path, save_all=True, append_images=rest, duration=duration_ms, **options)
        print(path, path.stat().st_size // 1000, "kB,", round(end_s - begin_s, 1), "s filmed")


def film(browser: Any, url: str) -> None:
    """An answer is read aloud, its picture drawn and looked at; the timeline shows a demo."""
    with page_of(browser, url, FILM) as page:
        be_exact(page)
        page.locator("#timeline-window").evaluate("(select) => { select.value = '5'; }")
        page.get_by_label("Message", exact=True).click()
        page.wait_for_timeout(500)
        recorded = Film(page)
        page.wait_for_timeout(600)
        ask(page, QUESTION, delay_ms=25)
        page.wait_for_timeout(300)
        page.get_by_role("button", name="Read aloud").click()
        page.wait_for_timeout(1200)
        draw(page)
        page.wait_for_timeout(500)
        look(page)
        page.wait_for_timeout(900)
        go(page, "timeline")
        page.locator("#timeline-demo").evaluate("(button) => button.click()")
        page.wait_for_timeout(3500)
        recorded.close()
    recorded.save(IMAGES / "page.webp")


def main(url: str, wanted: list[str]) -> None:
    """Make the wanted ones; without any, all."""
    if "examples" in wanted or not wanted:
        examples(url)
    with (
        tempfile.TemporaryDirectory() as folder,
        chromium(microphone_of(url, ASKED, Path(folder))) as browser,
    ):
        for name, prepare in SCENES.items():
            if name in wanted or not wanted:
                with page_of(browser, url, TALL if name == "chat" else DESK) as page:
                    prepare(page)
                    save(shot(page), name)
        for name, make in (("phone", phones), ("film", film)):
            if name in wanted or not wanted:
                make(browser, url)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2:])

"""Make the images of docs/page.md from a running server.

PYTHONPATH=tests python docs/page_images.py http://127.0.0.1:8000

Owns the scene of each image. Needs a Chromium, Playwright and a server of all embedded models.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from support.browser import chromium, opened

IMAGES = Path(__file__).with_name("images")
DESK = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
GAP = 24
QUESTION = "Write a short list of three uses of Python, with a one-line code example for each."
BUSY = """() => {  // a browser has six connections to a server: one stays for embeddings
    const post = (path, body) => fetch(path, {
        method: "POST",
        headers: {"Content-Type": "application/json"},
        body: JSON.stringify(body),
    }).then((reply) => reply.arrayBuffer());
    const text = "It was a bright cold day in April, and the clocks were striking. ".repeat(9);
    const messages = [{role: "user", content: "Tell me a long story about a lighthouse."}];
    post("/v1/audio/speech", {model: "triptych-voice", input: text, response_format: "pcm"});
    post("/v1/images/generations", {prompt: "a red apple", n: 2, steps: 40});
    for (const seed of [1, 2]) post("/v1/chat/completions",
        {model: "smollm2-135m-instruct", messages, max_tokens: 300, ignore_eos: true, seed});
    for (let turn = 0; turn < 12; turn += 1) setTimeout(() => post("/v1/embeddings",
        {model: "all-minilm-l6-v2", input: ["a cat", text]}), 400 * turn);
}"""


def shot(page: Any) -> Image.Image:
    """The page as it is now."""
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def save(image: Image.Image, name: str) -> None:
    """Write a small file."""
    path = IMAGES / f"page_{name}.webp"
    image.save(path, quality=82, method=6)
    print(path, path.stat().st_size // 1000, "kB")


def go(page: Any, panel: str) -> None:
    """Show a panel."""
    page.evaluate("(name) => { location.hash = name; }", panel)
    page.locator(f"#{panel}").wait_for()


def chat(page: Any, text: str = QUESTION, num_tokens: int = 220) -> None:
    """Ask, and wait for the answer."""
    go(page, "chat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill(str(num_tokens))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator(".turn.assistant:not([aria-busy])").last.wait_for(timeout=60_000)
    page.wait_for_timeout(300)


def speak(page: Any) -> None:
    """Speak the example text, and transcribe it."""
    go(page, "speech")
    page.get_by_role("button", name="Speak").click()
    page.get_by_role("button", name="Use generated speech").click(timeout=60_000)
    page.locator(".word").first.wait_for(timeout=60_000)
    page.wait_for_timeout(1500)


def generate(page: Any) -> None:
    """Generate some images, and paint a mask on one."""
    go(page, "images")
    for prompt, seed in (("two green frogs", 2), ("a penguin next to a house", 2)):
        page.locator("#image-prompt").fill(prompt)
        page.locator("#image-count").fill("2")
        page.locator("#image-seed").fill(str(seed))
        page.get_by_role("button", name="Generate").click()
        page.get_by_text("Generated in").wait_for(timeout=120_000)
    page.get_by_role("button", name="Edit this image").first.click()
    box = page.locator("#mask-paint").bounding_box()
    page.mouse.move(box["x"] + 70, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 110, box["y"] + 140, steps=9)
    page.mouse.up()
    page.mouse.move(5, 5)
    page.evaluate("document.querySelector('main').scrollTo(0, 0)")


def work(page: Any) -> None:
    """Let the engine do several things at once."""
    go(page, "timeline")
    page.locator(".lane").first.wait_for()
    page.evaluate(BUSY)
    page.wait_for_timeout(8500)


SCENES = {"chat": chat, "speech": speak, "images": generate, "timeline": work}


def main(url: str) -> None:
    """Make all of them."""
    with chromium() as browser:
        for name, prepare in SCENES.items():
            with opened(browser, url, viewport=DESK, color_scheme="light") as page:
                prepare(page)
                save(shot(page), name)
        phones = []
        for name in ("chat", "images", "timeline"):
            with opened(browser, url, viewport=PHONE, color_scheme="dark") as page:
                SCENES[name](page)
                phones.append(shot(page))
        row = Image.new(
            "RGB", (len(phones) * (PHONE["width"] + GAP) - GAP, PHONE["height"]), "white"
        )
        for index, image in enumerate(phones):
            row.paste(image, (index * (PHONE["width"] + GAP), 0))
        save(row, "phone")


if __name__ == "__main__":
    main(sys.argv[1])

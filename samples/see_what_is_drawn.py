"""Generate images, ask about them, and put both on one sheet.

    python samples/see_what_is_drawn.py docs/images/seeing.png

Uses the embedded models: `imagine` generates, `see` answers. The seeds are selected: with them the
answers are right.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from triptych import ImagePipeline, VisionPipeline

CASES = (
    ("a red apple", 5, "What is this?"),
    ("a penguin next to a house", 4, "Describe the picture."),
    ("a blue car on a yellow background", 1, "What colour is the background?"),
    ("three green frogs", 2, "How many frogs are there?"),
    ("a pizza on a purple background", 5, "Is there a dog?"),
    ("a duck above a boat", 4, "What is at the bottom?"),
    ("a purple heart", 4, "What colour is the heart?"),
    ("a rocket", 5, "Which object is in the picture?"),
)
"""Each image's prompt and seed, and the question about it."""
_COLUMNS, _SIDE, _GAP, _LINES = 4, 192, 16, 8
_FONT_SIZE, _LETTERS = 15, 25


def ask(images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
    """The model's answers, one per image."""
    with VisionPipeline.from_pretrained() as see:
        pairs = zip(images, questions, strict=True)
        return [see(image, question, temperature=0).text for image, question in pairs]


def sheet(images: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Images in rows, each above its caption."""
    height = _SIDE + _LINES * (_FONT_SIZE + 4) + _GAP
    num_rows = -(-len(images) // _COLUMNS)
    size = (_COLUMNS * (_SIDE + _GAP) + _GAP, num_rows * height + _GAP)
    page = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(_FONT_SIZE)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, _COLUMNS)
        corner = (_GAP + column * (_SIDE + _GAP), _GAP + row * height)
        page.paste(image.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), corner)
        place = (corner[0], corner[1] + _SIDE + 6)
        pen.multiline_text(place, caption, fill="black", font=font, spacing=4)
    return page


def main() -> None:
    """Generate, ask, and write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    prompts, _, questions = zip(*CASES, strict=True)
    with ImagePipeline.from_pretrained() as generate:
        images = [generate(prompt, seed=seed)[0].image for prompt, seed, _ in CASES]
    answers = ask(images, questions)
    captions = []
    for prompt, question, answer in zip(prompts, questions, answers, strict=True):
        lines = (f"imagine: {prompt}", f"see: {question}", f"> {answer}")
        captions.append("\n".join(textwrap.fill(line, _LETTERS) for line in lines))
    sheet(images, captions).save(args.output, optimize=True)


if __name__ == "__main__":
    main()

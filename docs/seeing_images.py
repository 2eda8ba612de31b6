"""Make the image of docs/vision.md: generated images, and answers of the vision model about them.

python docs/seeing_images.py

Owns the prompts and questions. Answers are unselected, right or wrong.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from triptych import ImagePipeline, VisionPipeline

FILE = Path(__file__).with_name("images") / "seeing.png"
ASKED = (
    ("a boat", "What is this?"),
    ("a penguin next to a house", "Describe the picture."),
    ("a blue car on a yellow background", "What colour is the background?"),
    ("two frogs", "How many frogs are there?"),
    ("a pizza on a purple background", "Is there a dog?"),
    ("a duck above a boat", "What is at the bottom?"),
    ("a purple heart", "What colour is the heart?"),
    ("a rocket", "Which object is in the picture?"),
)
"""Each image's prompt, and the question about it."""
COLUMNS, SIDE, GAP, TEXT_HEIGHT = 4, 192, 16, 170
LINE_LENGTH, FONT_SIZE = 25, 15


def tile(image: Image.Image, text: str) -> Image.Image:
    """An image with text below it."""
    made = Image.new("RGB", (SIDE, SIDE + TEXT_HEIGHT), "white")
    made.paste(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    lines = [line for part in text.splitlines() for line in wrap(part, LINE_LENGTH)]
    font = ImageFont.load_default(FONT_SIZE)
    ImageDraw.Draw(made).text((0, SIDE + 8), "\n".join(lines), fill="black", font=font)
    return made


def main() -> None:
    """Generate, ask, and combine the results."""
    with ImagePipeline.from_pretrained() as pipeline:
        images = [
            pipeline(prompt, seed=number)[0].image for number, (prompt, _) in enumerate(ASKED, 1)
        ]
    tiles = []
    with VisionPipeline.from_pretrained() as see:
        for image, (prompt, question) in zip(images, ASKED, strict=True):
            said = see(image, question, temperature=0, max_tokens=40).text
            tiles.append(tile(image, f"imagine: {prompt}\nsee: {question}\n> {said}"))
    width, height = SIDE + GAP, SIDE + TEXT_HEIGHT + GAP
    num_rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width + GAP, num_rows * height + GAP), "white")
    for index, made in enumerate(tiles):
        row, column = divmod(index, COLUMNS)
        sheet.paste(made, (GAP + column * width, GAP + row * height))
    sheet.save(FILE, optimize=True)


if __name__ == "__main__":
    main()

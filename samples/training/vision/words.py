"""Printed words: the lexicon, and how they are rendered.

Owns the lexicon (whole words that are one token of the language model, most frequent first), which
of them are held out, and the fonts: Pillow's own and those that come with matplotlib.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path

import hibari
import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer

NUM_WORDS = 2000
LONGEST = 8
UNSEEN_FONT = "DejaVuSerif-Bold.ttf"
"""Its words are only read in the evaluation."""
FONTS = (
    "",  # Pillow's own
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf",
    "DejaVuSerif.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralBol.ttf",
    "cmss10.ttf",
)
_HELD_OUT_SHARE = 1 / 16
_WORD = re.compile(rf"Ġ[a-z]{{3,{LONGEST}}}")


def lexicon(tokenizer: Path) -> list[str]:
    """The words that can be read, the most frequent first."""
    file = Path(hibari.__file__).parent / "assets" / "lexicon_us_gold.json.gz"
    known = json.loads(gzip.decompress(file.read_bytes()))
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab()
    tokens = sorted(filter(_WORD.fullmatch, vocabulary), key=vocabulary.__getitem__)
    return [token[1:] for token in tokens if token[1:] in known][:NUM_WORDS]


def is_held_out(word: str) -> bool:
    """Whether it is held out from training: a fixed sixteenth."""
    digest = hashlib.sha256(word.encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


def cased(word: str, rng: np.random.Generator) -> str:
    """The word in lower or upper case, or capitalized."""
    return str(rng.choice([word, word.upper(), word.title()], p=[0.4, 0.35, 0.25]))


def write(
    picture: Image.Image,
    text: str,
    font: str,
    ink: tuple[int, int, int],
    box: tuple[float, float, float],
) -> None:
    """Draw a word around a centre, in a width: `box` is x, y, width as shares of the side."""
    x, y, width = (share * picture.width for share in box)
    size = 64
    left, _, right, _ = _open(font, size).getbbox(text)
    size = max(12, min(round(size * width / (right - left)), round(picture.width * 0.28)))
    ImageDraw.Draw(picture).text((x, y), text, fill=ink, font=_open(font, size), anchor="mm")


@lru_cache(maxsize=1024)
def _open(font: str, size: int) -> ImageFont.FreeTypeFont:
    if not font:
        own = ImageFont.load_default(size)
        assert isinstance(own, ImageFont.FreeTypeFont)
        return own
    return ImageFont.truetype(str(Path(mpl.get_data_path(), "fonts", "ttf", font)), size)

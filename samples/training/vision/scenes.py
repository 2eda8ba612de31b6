"""The content of an image as data: a composition, a printed word, or both; and rendering it.

Owns how compositions of `pictures` become varied training images: objects moved, rotated and
mirrored, background colours perturbed, images blurred and made noisy. What `pictures` holds out is
held out here in every style.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from looks import LOOKS, Looks
from pictures.compositions import BACKGROUNDS, Catalogue, Composition, sample
from PIL import Image, ImageEnhance
from words import FONTS, cased, is_held_out, write

SIDE = 224
"""Side of images in pixels, as the tower takes them."""
EMPTY = "empty"
"""The layout of an image without objects."""
_KEPT: Mapping[str, float] = MappingProxyType(
    {"single": 0.3, "pair": 0.7, **dict.fromkeys(("large", "small"), 0.5)}
)
"""Shares of the sampled compositions of `pictures` that are kept, by layout."""
_STYLE_CHANCES = (0.34, 0.26, 0.2, 0.2)
_WORD_SHARE, _TITLED_SHARE = 0.2, 0.35
_SPRITE = 144
_INKS = ("white", "black", "red", "blue", "green", "yellow")
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """An image. `word` is the printed word, `look` the style of its objects."""

    composition: Composition
    look: str = "3d"
    word: str = ""
    font: str = ""
    ink: str = "black"

    @property
    def is_held_out(self) -> bool:
        """Whether its combination of objects, or its word, is held out."""
        plain = replace(self.composition, style="3d")
        is_known = not self.composition.things or not plain.is_held_out
        return not is_known or (bool(self.word) and is_held_out(self.word.lower()))


def sample_scene(catalogue: Catalogue, lexicon: Sequence[str], rng: np.random.Generator) -> Scene:
    """A random image, held out or not."""
    look = str(rng.choice(LOOKS, p=_STYLE_CHANCES))
    if rng.random() < _WORD_SHARE:
        ground = str(rng.choice(list(BACKGROUNDS)))
        return _worded(Scene(Composition(EMPTY, (), ground), look), lexicon, rng)
    while True:
        one = sample(catalogue, rng)
        if rng.random() < _KEPT.get(one.layout, 1.0):
            break
    scene = Scene(one, look)
    is_titled = one.layout == "top" and rng.random() < _TITLED_SHARE
    return _worded(scene, lexicon, rng) if is_titled else scene


def sample_seen(catalogue: Catalogue, lexicon: Sequence[str], rng: np.random.Generator) -> Scene:
    """A random image that is not held out."""
    while (scene := sample_scene(catalogue, lexicon, rng)).is_held_out:
        pass
    return scene


def _worded(scene: Scene, lexicon: Sequence[str], rng: np.random.Generator) -> Scene:
    ground = np.array(BACKGROUNDS[scene.composition.background])
    inks = [i for i in _INKS if np.abs(ground - BACKGROUNDS[i]).sum() > 240]
    word = cased(lexicon[rng.integers(len(lexicon))], rng)
    return replace(scene, word=word, font=str(rng.choice(FONTS)), ink=str(rng.choice(inks)))


def draw(
    scene: Scene, catalogue: Catalogue, looks: Looks, rng: np.random.Generator | None = None
) -> Image.Image:
    """The image, `SIDE` pixels square; without `chance` as plain as `pictures` renders it."""
    ground = BACKGROUNDS[scene.composition.background]
    picture = Image.new("RGB", (SIDE, SIDE), ground if rng is None else _shifted(ground, rng))
    for thing, spot in scene.composition.spots if scene.composition.things else ():
        emoji, tint = catalogue.look(thing)
        style = scene.look if looks.has(scene.look, looks.code(emoji)) else "3d"
        sprite = looks.sprite(style, looks.code(emoji), tint, _SPRITE)
        x, y, size = spot.x, spot.y, spot.size
        if rng is not None:
            x, y = x + rng.uniform(-0.04, 0.04), y + rng.uniform(-0.04, 0.04)
            size *= rng.uniform(0.8, 1.05)
            sprite = _turned(sprite, rng)
        scale = size * SIDE / max(sprite.size)
        width, height = (max(1, round(side * scale)) for side in sprite.size)
        sprite = sprite.resize((width, height), Image.Resampling.BICUBIC)
        corner = round(x * SIDE - width / 2), round(y * SIDE - height / 2)
        picture.paste(sprite, corner, sprite)
    if scene.word:
        _print(scene, picture, rng)
    return picture if rng is None else _worn(picture, rng)


def _print(scene: Scene, picture: Image.Image, rng: np.random.Generator | None) -> None:
    x, y, width = 0.5, 0.75 if scene.composition.things else 0.5, 0.8
    if rng is not None:
        width = rng.uniform(0.55, 0.92)
        x += rng.uniform(-1, 1) * (0.96 - width) / 2
        y += rng.uniform(-0.04, 0.04) if scene.composition.things else rng.uniform(-0.25, 0.25)
    write(picture, scene.word, scene.font, BACKGROUNDS[scene.ink], (x, y, width))


def _shifted(colour: Colour, rng: np.random.Generator) -> Colour:
    red, green, blue = (np.array(colour) + rng.integers(-12, 13, 3)).clip(0, 255).tolist()
    return red, green, blue


def _turned(sprite: Image.Image, rng: np.random.Generator) -> Image.Image:
    if rng.random() < 0.4:
        sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.5:
        angle = rng.uniform(-14, 14)
        sprite = sprite.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    return sprite


def _worn(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Degrade as generated, small and screen images are: blurred, paler, noisy."""
    if rng.random() < 0.4:
        side = int(rng.integers(96, 180))
        small = picture.resize((side, side), Image.Resampling.BILINEAR)
        picture = small.resize(picture.size, Image.Resampling.BICUBIC)
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        if rng.random() < 0.3:
            picture = kind(picture).enhance(rng.uniform(0.8, 1.2))
    if rng.random() < 0.3:
        noise = rng.normal(0, rng.uniform(2, 9), (SIDE, SIDE, 3))
        picture = Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
    return picture

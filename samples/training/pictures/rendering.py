"""Images of arrangements: what is unsaid (set of drawings, poses, tints, places) is chosen anew.

Owns those choices, and painting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from PIL import Image

from pictures.arrangements import Arrangement
from pictures.compositions import PICTURE_SIZE, Catalogue, Thing
from pictures.drawings import OUTLINES, SETS, SIDE, Drawings
from pictures.grounds import Ground, Pixels, paint_ground
from pictures.placement import Placed, place
from pictures.sprites import TINTS, Tint, tinted

_FREE_TINT_SHARE = 0.3
_MIRRORED_SHARE, _TURNED_SHARE = 0.5, 0.3
_TURNS_DEGREES = (-12, 12)
_CELL = 8  # pixels: drawings begin where the codec's latents do
_LEAST_CONTRAST = 60.0


def choose_set(
    arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings, rng: np.random.Generator
) -> str:
    """A set of drawings in which all that is said is true."""
    fitting = _fitting_sets(arrangement, catalogue, drawings)
    weights = np.array([SETS[name].weight for name in fitting])
    return str(rng.choice(fitting, p=weights / weights.sum()))


def _fitting_sets(arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings) -> list[str]:
    """Sets of the style that is said, that have all the things."""
    emoji = [catalogue.look(thing)[0] for thing in arrangement.things]
    return [
        name
        for name, one in SETS.items()
        if arrangement.style in ("", one.style, one.word)
        and all(drawings.has(name, each) for each in emoji)
    ]


def drawable(arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings) -> Arrangement:
    """The arrangement, without its style if no set of that style can draw it."""
    if _fitting_sets(arrangement, catalogue, drawings):
        return arrangement
    return replace(arrangement, style="")


@dataclass(frozen=True, slots=True)
class Sketch:
    """What is chosen first of one image of an arrangement: the set of drawings, and places."""

    set_name: str
    placed: tuple[Placed, ...]


def sketch(
    arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings, rng: np.random.Generator
) -> Sketch:
    """Choose a set of drawings and places."""
    set_name = choose_set(arrangement, catalogue, drawings, rng)
    return Sketch(set_name, tuple(place(arrangement.relation, arrangement.place, rng)))


def render(
    arrangement: Arrangement,
    catalogue: Catalogue,
    drawings: Drawings,
    rng: np.random.Generator,
    chosen: Sketch | None = None,
) -> Image.Image:
    """One of the arrangement's many images, `PICTURE_SIZE` pixels square."""
    chosen = chosen or sketch(arrangement, catalogue, drawings, rng)
    looks = [
        _look(thing, chosen.set_name, catalogue, drawings, rng) for thing in arrangement.things
    ]
    if chosen.set_name == OUTLINES:
        looks = [
            _inked(look, thing, arrangement.ground, rng)
            for look, thing in zip(looks, arrangement.things, strict=True)
        ]
    picture = _canvas(arrangement.ground, looks, PICTURE_SIZE, rng)
    fronts = []
    for placed in chosen.placed:
        drawing = _posed(looks[placed.index], placed.spot.size * PICTURE_SIZE, rng)
        corner = (
            _cell(placed.spot.x * PICTURE_SIZE - drawing.width / 2),
            _cell(placed.spot.y * PICTURE_SIZE - drawing.height / 2),
        )
        picture.paste(drawing, corner, drawing)
        if placed.front < 1:
            cut = round(placed.front * drawing.height)
            lower = drawing.crop((0, cut, drawing.width, drawing.height))
            fronts.append((lower, (corner[0], corner[1] + cut)))
    for lower, corner in fronts:
        picture.paste(lower, corner, lower)
    return picture


def _cell(pixels: float) -> int:
    """The nearest place where a cell of latents begins.

    The codec turns what is moved by a whole cell into the same latents, moved. So a small model
    learns a few of each drawing, not one for every pixel that it may begin at.
    """
    return round(pixels / _CELL) * _CELL


def _look(
    thing: Thing, set_name: str, catalogue: Catalogue, drawings: Drawings, rng: np.random.Generator
) -> Image.Image:
    """The thing in a set, in the colour that is said, or now and then in one that is not."""
    emoji, colour = catalogue.look(thing)
    drawing = drawings.drawing(set_name, emoji)
    if thing.colour is None and thing.name in catalogue.tinted and rng.random() < _FREE_TINT_SHARE:
        return tinted(drawing, Tint(float(rng.random()), 0.9))
    if colour is None or colour not in catalogue.colours(thing.name) or set_name == OUTLINES:
        return drawing
    tint = TINTS[colour]
    return tinted(drawing, Tint(tint.hue + rng.uniform(-0.012, 0.012), tint.saturation, tint.value))


def _inked(
    drawing: Image.Image, thing: Thing, ground: Ground, rng: np.random.Generator
) -> Image.Image:
    """An outline in the colour that is said, else in a dark one, or a light one on the dark."""
    is_dark = ground.colour == "black" or ground.scene in ("night", "sunset")
    ink = rng.uniform(215, 255, 3) if is_dark else rng.uniform(10, 60, 3)
    if thing.colour is not None:
        ink = _INKS[thing.colour] + rng.uniform(-12, 12, 3)
    filled = Image.new("RGBA", drawing.size, tuple(ink.clip(0, 255).astype(int).tolist()))
    filled.putalpha(drawing.getchannel("A"))
    return filled


_INKS: Mapping[str, Pixels] = MappingProxyType(
    {
        "red": np.array((205, 40, 40), np.float32),
        "orange": np.array((240, 140, 40), np.float32),
        "yellow": np.array((245, 205, 50), np.float32),
        "green": np.array((55, 155, 70), np.float32),
        "blue": np.array((45, 105, 215), np.float32),
        "purple": np.array((135, 80, 195), np.float32),
        "pink": np.array((245, 140, 185), np.float32),
        "brown": np.array((125, 80, 50), np.float32),
        "gray": np.array((130, 130, 135), np.float32),
    }
)


def _canvas(
    ground: Ground, looks: Sequence[Image.Image], side: int, rng: np.random.Generator
) -> Image.Image:
    """A painted ground on which all things can be seen, as far as what is said allows."""
    means = [_mean_colour(look) for look in looks]
    for _ in range(4):
        painted = paint_ground(ground, side, rng)
        middle = painted.mean((0, 1))
        if all(np.abs(middle - mean).sum() > _LEAST_CONTRAST for mean in means):
            break
    return Image.fromarray(painted.round().astype(np.uint8))


def _mean_colour(look: Image.Image) -> Pixels:
    small = np.asarray(look.reduce(8), np.float32)
    weights = small[..., 3:] + 1e-3
    mean: Pixels = (small[..., :3] * weights).sum((0, 1)) / weights.sum((0, 1))
    return mean


def _posed(look: Image.Image, size: float, rng: np.random.Generator) -> Image.Image:
    """A drawing mirrored, turned and scaled so that its longer side, upright, is `size` pixels."""
    if rng.random() < _MIRRORED_SHARE:
        look = look.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < _TURNED_SHARE:
        angle = float(rng.choice(_TURNS_DEGREES))
        look = look.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    scale = size / SIDE
    width, height = (max(1, round(length * scale)) for length in look.size)
    return look.resize((width, height), Image.Resampling.BICUBIC)

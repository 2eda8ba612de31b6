"""Images of arrangements: what is unsaid (set of drawings, poses, tints, places) is chosen anew.

Owns those choices, and painting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pictures.arrangements import Arrangement
from pictures.chances import Chances
from pictures.compositions import PICTURE_SIZE, Catalogue, Thing
from pictures.drawings import OUTLINES, SETS, SIDE, Drawings
from pictures.grounds import Ground, Pixels, paint_ground
from pictures.placement import Placed, place
from pictures.sprites import TINTS, Tint, tinted

_FREE_TINT_SHARE = 0.3
_MIRRORED_SHARE, _TURNED_SHARE = 0.3, 0.06
_TURNS_DEGREES = (-12, 12)
_LEAST_TURNED = 64  # pixels: what is smaller stays upright
_LEAST_CONTRAST = 60.0
TOKEN_SIDE = 16
"""Pixels of one of the model's tokens: drawings begin where they do."""


def choose_set(
    arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings, rng: np.random.Generator
) -> str:
    """A set of drawings in which all that is said is true.

    Each set has its own value, and the highest of those that fit is chosen: which sets fit is not
    to change what a value says, as it would if one value were compared with sums of weights.
    """
    values = dict(zip(SETS, rng.gumbel(size=len(SETS)), strict=True))
    fitting = _fitting_sets(arrangement, catalogue, drawings)
    return max(fitting, key=lambda name: values[name] + np.log(SETS[name].weight))


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


@dataclass(frozen=True, slots=True)
class Pose:
    """Where in the image a drawing of the arrangement's thing `index` lies, in pixels."""

    index: int
    left: int
    top: int
    width: int
    height: int
    is_mirrored: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """An image, the poses of its drawings, and whose each pixel is, `[H, W]`: 0 is the ground."""

    image: Image.Image
    poses: tuple[Pose, ...]
    owners: NDArray[np.uint8]


def render(
    arrangement: Arrangement,
    catalogue: Catalogue,
    drawings: Drawings,
    rng: np.random.Generator,
    chosen: Sketch | None = None,
) -> Image.Image:
    """One of the arrangement's many images, `PICTURE_SIZE` pixels square."""
    chosen = chosen or sketch(arrangement, catalogue, drawings, rng)
    return paint(arrangement, catalogue, drawings, Chances.free(rng), chosen).image


def paint(
    arrangement: Arrangement,
    catalogue: Catalogue,
    drawings: Drawings,
    chances: Chances,
    chosen: Sketch,
) -> Drawn:
    """An image of what is chosen, and what is where in it."""
    looks = [
        _look(thing, chosen.set_name, catalogue, drawings, chances.colours)
        for thing in arrangement.things
    ]
    if chosen.set_name == OUTLINES:
        looks = [
            _inked(look, thing, arrangement.ground, chances.colours)
            for look, thing in zip(looks, arrangement.things, strict=True)
        ]
    layers = _Layers(_canvas(arrangement.ground, looks, PICTURE_SIZE, chances.grounds))
    for placed in chosen.placed:
        size = placed.spot.size * PICTURE_SIZE
        drawing, is_mirrored = _posed(looks[placed.index], size, chances.poses)
        left, top = (
            _cell(placed.spot.x * PICTURE_SIZE - drawing.width / 2),
            _cell(placed.spot.y * PICTURE_SIZE - drawing.height / 2),
        )
        layers.add(drawing, Pose(placed.index, left, top, *drawing.size, is_mirrored), placed.front)
    return layers.merged()


class _Layers:
    """Drawings one over another; parts of some are in front of all."""

    def __init__(self, ground: Image.Image) -> None:
        self._picture, self._owners = ground, Image.new("L", ground.size)
        self._poses: list[Pose] = []
        self._fronts: list[tuple[Image.Image, tuple[int, int], int]] = []

    def add(self, drawing: Image.Image, pose: Pose, front: float) -> None:
        """Paste a drawing; what is below the share `front` of it is pasted again at the end."""
        self._poses.append(pose)
        self._paste(drawing, (pose.left, pose.top), len(self._poses))
        if front < 1:
            cut = round(front * drawing.height)
            lower = drawing.crop((0, cut, drawing.width, drawing.height))
            self._fronts.append((lower, (pose.left, pose.top + cut), len(self._poses)))

    def _paste(self, drawing: Image.Image, corner: tuple[int, int], owner: int) -> None:
        self._picture.paste(drawing, corner, drawing)
        shown = drawing.getchannel("A").point(lambda alpha: 255 if alpha > 127 else 0)
        self._owners.paste(owner, corner, shown)

    def merged(self) -> Drawn:
        """All of them."""
        for front in self._fronts:
            self._paste(*front)
        return Drawn(self._picture, tuple(self._poses), np.asarray(self._owners))


def _cell(pixels: float) -> int:
    """The nearest place where a token begins.

    The codec turns what is moved by a whole token into the same token, moved. So a small model
    learns one of each drawing and size, not one for every pixel that it may begin at.
    """
    return round(pixels / TOKEN_SIDE) * TOKEN_SIDE


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
    others = () if ground.colour or ground.scene else ("white", "black")
    for one in (ground, *(replace(ground, colour=colour) for colour in others)):
        painted = paint_ground(one, side, rng)
        middle = painted.mean((0, 1))
        if all(np.abs(middle - mean).sum() > _LEAST_CONTRAST for mean in means):
            break
    return Image.fromarray(painted.round().astype(np.uint8))


def _mean_colour(look: Image.Image) -> Pixels:
    small = np.asarray(look.reduce(8), np.float32)
    weights = small[..., 3:] + 1e-3
    mean: Pixels = (small[..., :3] * weights).sum((0, 1)) / weights.sum((0, 1))
    return mean


def _posed(look: Image.Image, size: float, rng: np.random.Generator) -> tuple[Image.Image, bool]:
    """A drawing turned and scaled so that its longer side, upright, is `size` pixels.

    And whether it is mirrored.
    """
    is_mirrored = rng.random() < _MIRRORED_SHARE
    if is_mirrored:
        look = look.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if size >= _LEAST_TURNED and rng.random() < _TURNED_SHARE:
        angle = float(rng.choice(_TURNS_DEGREES))
        look = look.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    scale = size / SIDE
    width, height = (max(1, round(length * scale)) for length in look.size)
    return look.resize((width, height), Image.Resampling.BICUBIC), is_mirrored

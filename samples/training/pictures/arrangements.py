"""What a caption says of an image, as data, and images of which that is true.

Owns the relations between things, where they put them, random sampling, what is held out, and
rendering: all that an `Arrangement` leaves unsaid (the set of drawings, poses, tints, places,
the ground) is chosen anew for each image, so that one caption has many images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from PIL import Image

from pictures.compositions import PICTURE_SIZE, Catalogue, Spot, Thing
from pictures.drawings import OUTLINES, SETS, SIDE, STYLES, Drawings
from pictures.grounds import Ground, Pixels, paint_ground, sample_ground
from pictures.sprites import TINTS, Tint, tinted

PLACES = ("left", "right", "top", "bottom", "large", "small")
COUNTS: Mapping[str, int] = MappingProxyType({"two": 2, "three": 3, "four": 4, "five": 5})
ORDERED = (
    *("left of", "above", "below", "on", "under", "in", "riding", "holding"),
    *("in front of", "behind", "between"),
)
"""Relations in which the order of the things matters."""
_CHANCES: Mapping[str, float] = MappingProxyType(
    {
        "": 0.48,
        "next to": 0.08,
        "left of": 0.04,
        "above": 0.03,
        "below": 0.02,
        "on": 0.05,
        "under": 0.03,
        "in": 0.04,
        "riding": 0.05,
        "holding": 0.04,
        "in front of": 0.03,
        "behind": 0.02,
        "between": 0.02,
        "beside each other": 0.02,
        **dict.fromkeys(COUNTS, 0.0125),
    }
)
_NUM_THINGS: Mapping[str, int] = MappingProxyType(
    {"": 1, **dict.fromkeys(COUNTS, 1), "between": 3, "beside each other": 3}
)
_HELD_OUT_SHARE = 1 / 16
_PLACE_SHARE, _STYLE_SHARE, _TINT_SHARE, _SET_WORD_SHARE = 0.2, 0.22, 0.7, 0.2
_FREE_TINT_SHARE, _OWN_COLOUR_SHARE = 0.3, 0.25
_OWN_COLOURED = ("noto-v1", "fxemoji")  # sets whose colours are often not those in nature
_MIRRORED_SHARE, _UPRIGHT_SHARE = 0.5, 0.4
_LEAST_CONTRAST = 60.0
_FITTING_SHARE = 0.75
_CONTAINERS = (
    *("basket", "bucket", "cup", "boat", "car", "backpack", "gift", "bed", "hat", "boot", "bus"),
    *("truck", "ufo", "house", "tent", "shoe", "taxi", "popcorn", "fries", "castle", "ship"),
)
_MOUNTS = (
    *("bicycle", "motorcycle", "skateboard", "horse", "elephant", "car", "truck", "boat", "rocket"),
    *("cow", "dinosaur", "dragon", "unicorn", "whale", "dolphin", "turtle", "tractor", "train"),
    *("airplane", "ship", "bus", "lion", "tiger", "pig", "sheep", "zebra", "crocodile", "broom"),
)
_LIKE_PEOPLE = ("robot", "teddy-bear", "snowman")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is said of an image. `relation` is "" for one thing; "two" to "five" repeat one."""

    relation: str
    things: tuple[Thing, ...]
    ground: Ground = field(default_factory=Ground)
    style: str = ""
    """A style, a set's word, or "" for any."""
    place: str = ""
    """Where or how large one thing is, if that is said."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is held out from training: a fixed sixteenth of all combinations."""
        ordered = self.relation in ORDERED
        things = map(repr, self.things) if ordered else sorted(map(repr, self.things))
        parts = (self.relation, *things, repr(self.ground), self.style, self.place)
        digest = hashlib.sha256("|".join(parts).encode()).digest()
        return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


@dataclass(frozen=True, slots=True)
class Placed:
    """A thing's number, its spot, and the share of it below which it is drawn again at the end."""

    index: int
    spot: Spot
    front: float = 1.0


def sample_arrangement(catalogue: Catalogue, rng: np.random.Generator) -> Arrangement:
    """A random arrangement, held out or not."""
    relation = str(rng.choice(list(_CHANCES), p=list(_CHANCES.values())))
    names = _names(relation, catalogue, rng)
    ground = sample_ground(rng)
    is_placed = not relation and rng.random() < _PLACE_SHARE
    return Arrangement(
        relation,
        tuple(_sample_thing(name, catalogue, ground, rng) for name in names),
        ground,
        _sample_style(rng),
        str(rng.choice(PLACES)) if is_placed else "",
    )


def _sample_style(rng: np.random.Generator) -> str:
    if rng.random() >= _STYLE_SHARE:
        return ""
    if rng.random() < _SET_WORD_SHARE:
        return str(rng.choice([one.word for one in SETS.values() if one.word]))
    return str(rng.choice(STYLES))


def _names(relation: str, catalogue: Catalogue, rng: np.random.Generator) -> list[str]:
    """Names of the things, most of the time such as fit the relation."""
    names = list(catalogue.names)
    if relation in COUNTS:
        names = [name for name in names if catalogue.plurals.get(name) != ""]
    chosen = [str(name) for name in rng.choice(names, _NUM_THINGS.get(relation, 2), replace=False)]
    if rng.random() < _FITTING_SHARE:
        kinds = catalogue.categories
        alive = [n for n in names if kinds[n] in ("animals", "faces") or n in _LIKE_PEOPLE]
        firsts = alive if relation in ("riding", "holding") else names
        seconds = {"riding": _MOUNTS, "in": _CONTAINERS}.get(relation, tuple(names))
        if relation == "holding":
            seconds = tuple(n for n in names if kinds[n] in ("food", "things", "plants"))
        fitting = [n for n in seconds if n in kinds]
        first = str(rng.choice(firsts))
        second = str(rng.choice([n for n in fitting if n != first]))
        if len(chosen) == 2:
            return [first, second]
    return chosen


def _sample_thing(
    name: str, catalogue: Catalogue, ground: Ground, rng: np.random.Generator
) -> Thing:
    own = catalogue.own_colours.get(name)
    if own is not None and own != ground.colour and rng.random() < _OWN_COLOUR_SHARE:
        return Thing(name, own)
    colours = [colour for colour in catalogue.colours(name) if colour != ground.colour]
    if not colours or rng.random() >= _TINT_SHARE:
        return Thing(name)
    return Thing(name, str(rng.choice(colours)))


def choose_set(
    arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings, rng: np.random.Generator
) -> str:
    """A set of drawings in which all that is said is true."""
    fitting = _fitting_sets(arrangement, catalogue, drawings)
    weights = np.array([SETS[name].weight for name in fitting])
    return str(rng.choice(fitting, p=weights / weights.sum()))


def _fitting_sets(arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings) -> list[str]:
    """Sets of the style that is said, that have all the things, in the colours that are said."""
    emoji = [catalogue.look(thing)[0] for thing in arrangement.things]
    is_natural = any(
        thing.colour is not None and thing.colour not in catalogue.colours(thing.name)
        for thing in arrangement.things
    )
    return [
        name
        for name, one in SETS.items()
        if arrangement.style in ("", one.style, one.word)
        and all(drawings.has(name, each) for each in emoji)
        and not (is_natural and name in _OWN_COLOURED)
    ]


def drawable(arrangement: Arrangement, catalogue: Catalogue, drawings: Drawings) -> Arrangement:
    """The arrangement, without its style if no set of that style can draw it."""
    if _fitting_sets(arrangement, catalogue, drawings):
        return arrangement
    return replace(arrangement, style="")


def place(arrangement: Arrangement, rng: np.random.Generator) -> list[Placed]:
    """Spots of the things, those behind first."""
    relation = arrangement.relation
    if not relation:
        return [Placed(0, _lone_spot(arrangement.place, rng))]
    if relation in COUNTS:
        spots = _scattered(COUNTS[relation], rng)
        return [Placed(0, spot) for spot in spots]
    if relation in ("between", "beside each other"):
        return _row(relation == "between", rng)
    return _pair(relation, rng)


def _lone_spot(said: str, rng: np.random.Generator) -> Spot:
    size = {"large": rng.uniform(0.86, 0.99), "small": rng.uniform(0.3, 0.42)}.get(
        said, rng.uniform(0.36, 0.5) if said else rng.uniform(0.5, 0.92)
    )
    free = (1 - size) / 2
    x, y = 0.5 + free * rng.uniform(-1, 1, 2)
    aside = rng.uniform(0.2, 0.29)
    x = {"left": aside, "right": 1 - aside}.get(said, x)
    y = {"top": aside, "bottom": 1 - aside}.get(said, y)
    return Spot(float(x), float(y), float(size))


def _scattered(count: int, rng: np.random.Generator) -> list[Spot]:
    """Spots of several of a kind, apart from each other."""
    size = {2: 0.46, 3: 0.4, 4: 0.37, 5: 0.31}[count] * rng.uniform(0.82, 1.05)
    grids = {
        2: [[(-1, 0), (1, 0)], [(0, -1), (0, 1)], [(-1, -0.8), (1, 0.8)], [(-1, 0.8), (1, -0.8)]],
        3: [[(-1, -0.9), (1, -0.9), (0, 0.9)], [(-1, 0.9), (1, 0.9), (0, -0.9)]],
        4: [[(-1, -1), (1, -1), (-1, 1), (1, 1)], [(0, -1.1), (-1.1, 0), (1.1, 0), (0, 1.1)]],
        5: [[(-1.25, -1), (1.25, -1), (0, 0), (-1.25, 1), (1.25, 1)]],
    }
    offsets = grids[count][int(rng.integers(len(grids[count])))]
    reach = 0.5 - size / 2 - 0.01
    step = {2: 0.25, 3: 0.25, 4: 0.24, 5: 0.26}[count]
    moved = [0.5 + np.array(offset) * step + rng.uniform(-0.035, 0.035, 2) for offset in offsets]
    inside = [centre.clip(0.5 - reach, 0.5 + reach) for centre in moved]
    return [Spot(float(x), float(y), float(size * rng.uniform(0.92, 1.04))) for x, y in inside]


def _row(is_between: bool, rng: np.random.Generator) -> list[Placed]:
    """Three different things; with `is_between` the first is in the middle."""
    size = rng.uniform(0.28, 0.34)
    slots = [0.18, 0.5, 0.82]
    order = [1, 0, 2] if is_between else [0, 1, 2]
    if is_between and rng.random() < 0.5:
        order = [1, 2, 0]
    elif not is_between:
        order = [int(number) for number in rng.permutation(3)]
    bent = 0.0 if is_between else rng.choice([0.0, 0.18, -0.18])
    level = rng.uniform(0.42, 0.58)
    spots = []
    for index, slot in enumerate(order):
        y = level + (bent if slot == 1 else -bent) + rng.uniform(-0.04, 0.04)
        x = slots[slot] + rng.uniform(-0.01, 0.01)
        spots.append(Placed(index, Spot(float(x), float(y), float(size * rng.uniform(0.95, 1.05)))))
    return spots


def _pair(relation: str, rng: np.random.Generator) -> list[Placed]:
    """Two things. Offsets are from the one that stands to the one that is related to it."""
    if relation in ("next to", "left of"):
        first_size, second_size = rng.uniform(0.36, 0.49, 2)
        gap = 0.25 if relation == "left of" or rng.random() < 0.5 else -0.25
        level = rng.uniform(0.42, 0.58, 2)
        ways = rng.uniform(-0.015, 0.015, 2)
        return [
            Placed(0, Spot(0.5 - gap + ways[0], level[0], first_size)),
            Placed(1, Spot(0.5 + gap + ways[1], level[1], second_size)),
        ]
    return _PAIRS[relation](rng)


def _stacked(rng: np.random.Generator, upper: int, gap: float) -> list[Placed]:
    """One above the other; a negative gap lets them overlap, the upper one in front."""
    sizes = rng.uniform(0.37, 0.47), rng.uniform(0.4, 0.5)
    x = 0.5 + rng.uniform(-0.12, 0.12)
    total = sizes[0] + gap + sizes[1]
    top = 0.5 - total / 2 + rng.uniform(-0.02, 0.02)
    lean = rng.uniform(-0.06, 0.06)
    above = Placed(upper, Spot(x + lean, top + sizes[0] / 2, sizes[0]))
    below = Placed(1 - upper, Spot(x, top + sizes[0] + gap + sizes[1] / 2, sizes[1]))
    return [below, above]


def _inside(rng: np.random.Generator) -> list[Placed]:
    size = rng.uniform(0.58, 0.7)
    x, y = 0.5 + rng.uniform(-0.12, 0.12), 0.6 + rng.uniform(-0.03, 0.04)
    inner = size * rng.uniform(0.62, 0.75)
    above = y - size * rng.uniform(0.32, 0.42)
    lean = rng.uniform(-0.06, 0.06)
    return [
        Placed(1, Spot(x, y, size), front=rng.uniform(0.42, 0.52)),
        Placed(0, Spot(x + lean, max(above, inner / 2), inner)),
    ]


def _riding(rng: np.random.Generator) -> list[Placed]:
    size, rider = rng.uniform(0.54, 0.66), rng.uniform(0.4, 0.5)
    x, y = 0.5 + rng.uniform(-0.12, 0.12), 0.97 - size / 2 - rng.uniform(0.0, 0.06)
    seat = y - size * rng.uniform(0.34, 0.46)
    lean = rng.uniform(-0.08, 0.08)
    return [
        Placed(1, Spot(x, y, size)),
        Placed(0, Spot(x + lean, max(seat, rider / 2), rider)),
    ]


def _holding(rng: np.random.Generator) -> list[Placed]:
    size, held = rng.uniform(0.62, 0.76), rng.uniform(0.3, 0.38)
    hand = -1 if rng.random() < 0.5 else 1
    x, y = 0.5 - hand * rng.uniform(0.06, 0.12), 0.5 + rng.uniform(-0.06, 0.06)
    return [
        Placed(0, Spot(x, y, size)),
        Placed(1, Spot(x + hand * size * 0.42, y + size * rng.uniform(0.08, 0.24), held)),
    ]


def _before(rng: np.random.Generator, front: int) -> list[Placed]:
    size, near = rng.uniform(0.54, 0.66), rng.uniform(0.38, 0.48)
    aside = (-1 if rng.random() < 0.5 else 1) * rng.uniform(0.08, 0.16)
    return [
        Placed(1 - front, Spot(0.5 - aside, 0.36 + rng.uniform(-0.02, 0.03), size)),
        Placed(front, Spot(0.5 + aside, 0.73 + rng.uniform(-0.02, 0.03), near)),
    ]


_PAIRS = {
    "above": lambda rng: _stacked(rng, 0, 0.03),
    "below": lambda rng: _stacked(rng, 1, 0.03),
    "on": lambda rng: _stacked(rng, 0, -0.07),
    "under": lambda rng: _stacked(rng, 1, -0.02),
    "in": _inside,
    "riding": _riding,
    "holding": _holding,
    "in front of": lambda rng: _before(rng, 0),
    "behind": lambda rng: _before(rng, 1),
}


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
    return Sketch(set_name, tuple(place(arrangement, rng)))


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
            round(placed.spot.x * PICTURE_SIZE - drawing.width / 2),
            round(placed.spot.y * PICTURE_SIZE - drawing.height / 2),
        )
        picture.paste(drawing, corner, drawing)
        if placed.front < 1:
            cut = round(placed.front * drawing.height)
            lower = drawing.crop((0, cut, drawing.width, drawing.height))
            fronts.append((lower, (corner[0], corner[1] + cut)))
    for lower, corner in fronts:
        picture.paste(lower, corner, lower)
    return picture


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
    if rng.random() >= _UPRIGHT_SHARE:
        angle = float(np.clip(rng.normal(0, 9), -22, 22))
        look = look.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    scale = size / SIDE
    width, height = (max(1, round(length * scale)) for length in look.size)
    return look.resize((width, height), Image.Resampling.BICUBIC)

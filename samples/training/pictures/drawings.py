"""Several drawings of each object, from five sets of emoji in npm packages.

Owns the sets, the styles that a caption may name, fetching, and rendering of SVG. All sets are
under licences without share-alike, so that weights trained on them can be Apache-2.0. Knows
nothing of arrangements.
"""

from __future__ import annotations

import json
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType

from PIL import Image
from rich.progress import track

from pictures.compositions import Catalogue
from pictures.fetching import fetched
from pictures.sprites import Sprites, fetch_sprites
from triptych.core.weights.npm import NpmPackage

SIDE = 144
"""The longer side of a drawing in pixels."""
OUTLINES = "fluent-contrast"
"""The set without colours."""
_CLEAR = 8  # alpha that is as good as nothing


@dataclass(frozen=True, slots=True)
class DrawingSet:
    """A set of drawings: its style, how often it is chosen, its word in captions, its package."""

    style: str
    weight: float
    word: str = ""
    package: NpmPackage | None = None


def _iconify(name: str, version: str, sha256: str) -> NpmPackage:
    return NpmPackage(name=f"@iconify-json/{name}", version=version, sha256=sha256)


SETS: Mapping[str, DrawingSet] = MappingProxyType(
    {
        "fluent-3d": DrawingSet("3d", 0.5),
        "fluent-flat": DrawingSet(
            "flat",
            0.14,
            "fluent",
            _iconify(
                "fluent-emoji-flat",
                "1.2.6",
                "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
            ),
        ),
        "twemoji": DrawingSet(
            "flat",
            0.14,
            "twemoji",
            _iconify(
                "twemoji",
                "1.2.5",
                "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
            ),
        ),
        "noto": DrawingSet(
            "cartoon",
            0.18,
            "noto",
            _iconify(
                "noto",
                "1.2.9",
                "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
            ),
        ),
        OUTLINES: DrawingSet(
            "outline",
            0.04,
            "",
            _iconify(
                "fluent-emoji-high-contrast",
                "1.2.6",
                "0b92d48c90d2200bd499e3cdd09a127ca6a8c8ddefd34c35eb5a1e4994012ae0",
            ),
        ),
    }
)
"""Fluent (MIT), Twemoji (CC-BY-4.0) and Noto (Apache-2.0)."""
STYLES = tuple(dict.fromkeys(one.style for one in SETS.values()))


class Drawings:
    """Drawings by set and the emoji's name, as RGBA images without empty borders."""

    def __init__(self, folder: Path, sprites: Sprites) -> None:
        self._folder, self._sprites = folder, sprites
        self._files = {
            name: {file.stem: file for file in sorted((folder / name).glob("*.png"))}
            for name in SETS
            if name != "fluent-3d"
        }
        self._cache: dict[tuple[str, str], Image.Image] = {}

    def has(self, set_name: str, emoji: str) -> bool:
        """Whether a set draws an emoji."""
        return set_name == "fluent-3d" or emoji in self._files[set_name]

    def drawing(self, set_name: str, emoji: str) -> Image.Image:
        """An emoji in a set; cached."""
        key = set_name, emoji
        if key not in self._cache:
            self._cache[key] = self._open(*key)
        return self._cache[key]

    def _open(self, set_name: str, emoji: str) -> Image.Image:
        if set_name == "fluent-3d":
            return self._sprites.draw("3d", self._sprites.code(emoji), None, SIDE)
        with Image.open(self._files[set_name][emoji]) as file:
            return file.convert("RGBA")


class _Icons:
    """The SVG bodies in one of Iconify's packages, by name and by code point."""

    def __init__(self, archive: Path) -> None:
        with tarfile.open(archive, "r:gz") as tar:
            icons, chars = (
                json.loads(_member(tar, f"package/{name}.json")) for name in ("icons", "chars")
            )
        self.names: Mapping[str, str] = chars
        self._bodies = icons["icons"]
        self._aliases = icons.get("aliases", {})
        self._sides = [icons.get("width", 16), icons.get("height", 16)]

    def svg(self, name: str) -> str | None:
        """An icon as a file of its own, if there is one of this name."""
        icon = self._bodies.get(self._aliases.get(name, {}).get("parent", name))
        if icon is None:
            return None
        width, height = icon.get("width", self._sides[0]), icon.get("height", self._sides[1])
        view = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        attributes = f'xmlns="http://www.w3.org/2000/svg" viewBox="{view}" color="black"'
        return f'<svg {attributes} xmlns:xlink="http://www.w3.org/1999/xlink">{icon["body"]}</svg>'


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    stream = tar.extractfile(name)
    assert stream is not None, name
    return stream.read()


def fetch_drawings(folder: Path, catalogue: Catalogue) -> Drawings:
    """The drawings of the catalogue's objects in `folder`, made there at the first call."""
    sprites = fetch_sprites(folder / "sprites")
    home, done = folder / "drawings", folder / "drawings" / "done"
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        _render(home, catalogue, sprites)
        done.touch()
    return Drawings(home, sprites)


def _render(home: Path, catalogue: Catalogue, sprites: Sprites) -> None:
    icons = {}
    for name, one in SETS.items():
        if one.package is not None:
            with fetched(one.package, home) as archive:
                icons[name] = _Icons(archive)
    emoji = {*catalogue.sprites.values()}
    for others in catalogue.other_sprites.values():
        emoji |= {*others.values()}
    for name, found in icons.items():
        (home / name).mkdir(exist_ok=True)
        for each in track(sorted(emoji), f"Rendering {name}"):
            known = (found.svg(way) for way in _names(sprites.code(each), icons.values()))
            svg = next((text for text in known if text), None)
            if svg is not None:
                _trimmed(svg).save(home / name / f"{each}.png")


def _names(code: str, all_icons: Iterable[_Icons]) -> Iterator[str]:
    """What sets call an emoji: the names of all packages for it, and Unicode's run together."""
    parts = [part for part in code.split("-") if part != "fe0f"]
    for icons in all_icons:
        for key in (code, "-".join(parts)):
            if key in icons.names:
                yield icons.names[key]
    spelled = unicodedata.name(chr(int(parts[0], 16))).lower()
    yield "".join(letter for letter in spelled if letter.isalnum())


def _trimmed(svg: str) -> Image.Image:
    """An SVG as an image without empty borders, `SIDE` pixels on its longer side."""
    import resvg_py  # needed by the recipe alone, and only when drawings are made

    drawn = resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIDE, height=2 * SIDE)
    with Image.open(BytesIO(bytes(drawn))) as file:
        picture = file.convert("RGBA")
    shown = picture.getchannel("A").point(lambda alpha: 255 if alpha > _CLEAR else 0)
    picture = picture.crop(shown.getbbox())
    scale = SIDE / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)

"""Emoji as sprites: Fluent's 3D ones and Noto's flat ones, from two npm packages.

Owns fetching, the sprites' sizes and tints. Knows nothing of scenes and captions.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pictures.fetching import fetched
from triptych.core.weights.npm import NpmPackage

STYLES = ("3d", "flat")
FLUENT = NpmPackage(
    name="@lobehub/fluent-emoji-3d",
    version="1.1.0",
    sha256="c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
)
"""Microsoft's Fluent emoji in 3D, 256 pixels (MIT)."""
NOTO = NpmPackage(
    name="emoji-datasource-google",
    version="16.0.0",
    sha256="fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
)
"""Google's Noto emoji, 64 pixels, with the names in emoji.json (MIT; art Apache-2.0)."""


@dataclass(frozen=True, slots=True)
class Tint:
    """A colour as hue 0..1, and factors of saturation and value."""

    hue: float
    saturation: float = 1.0
    value: float = 1.0


TINTS: Mapping[str, Tint] = {
    "red": Tint(0.0),
    "orange": Tint(0.075),
    "yellow": Tint(0.14, value=1.15),
    "green": Tint(0.34, 0.85),
    "blue": Tint(0.59),
    "purple": Tint(0.76, 0.8),
    "pink": Tint(0.91, 0.55, 1.2),
}
"""Tints for sprites of one dominant colour."""
_HUE_REACH = 0.11
_LEAST_SATURATION = 0.25


class Sprites:
    """Sprites by style and the emoji's code, as RGBA images without empty borders."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            style: {path.stem: path for path in sorted((folder / style).iterdir())}
            for style in STYLES
        }
        self._codes = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
        self._cache: dict[tuple[str, str, str | None, int], Image.Image] = {}

    def codes(self, style: str) -> list[str]:
        """All codes of a style, without those of skin tones."""
        return list(self._files[style])

    def code(self, short_name: str) -> str:
        """The code of an emoji's name in emoji.json, such as "apple". Raises `KeyError`."""
        return str(self._codes[short_name])

    def sprite(self, style: str, code: str, tint: str | None, size: int) -> Image.Image:
        """A sprite whose longer side is `size` pixels, tinted if a colour is given; cached."""
        key = (style, code, tint, size)
        if key not in self._cache:
            self._cache[key] = self.draw(*key)
        return self._cache[key]

    def draw(self, style: str, code: str, tint: str | None, size: int) -> Image.Image:
        """As `sprite`, not cached."""
        picture = self._open(style, code)
        if tint is not None:
            picture = tinted(picture, TINTS[tint])
        scale = size / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        return picture.resize((width, height), Image.Resampling.LANCZOS)

    def _open(self, style: str, code: str) -> Image.Image:
        with Image.open(self._files[style][code]) as file:
            picture = file.convert("RGBA")
        shown = picture.getchannel("A").point(lambda alpha: 255 if alpha > 8 else 0)
        return picture.crop(shown.getbbox())


def tinted(picture: Image.Image, tint: Tint) -> Image.Image:
    """The image with its most frequent hue replaced by the tint's; other hues stay."""
    rgba = np.asarray(picture, np.float32) / 255
    hue, saturation, value = _to_hsv(rgba[..., :3])
    weight = saturation * value * rgba[..., 3] * (saturation > _LEAST_SATURATION)
    counts, edges = np.histogram(hue, bins=36, range=(0, 1), weights=weight)
    dominant = edges[counts.argmax()] + 0.5 / 36
    distance = np.abs((hue - dominant + 0.5) % 1 - 0.5)
    is_moved = (distance < _HUE_REACH) & (saturation > 0.12)
    hue = np.where(is_moved, tint.hue + 0.3 * (hue - dominant), hue) % 1
    saturation = np.where(is_moved, (saturation * tint.saturation).clip(0, 1), saturation)
    value = np.where(is_moved, (value * tint.value).clip(0, 1), value)
    rgb = _to_rgb(hue, saturation, value)
    done = np.concatenate((rgb, rgba[..., 3:]), -1)
    return Image.fromarray((done * 255).round().astype(np.uint8), "RGBA")


def _to_hsv(rgb: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    high, low = rgb.max(-1), rgb.min(-1)
    spread = np.maximum(high - low, 1e-6)
    red, green, blue = (rgb[..., channel] for channel in range(3))
    hue = np.select(
        [high == red, high == green],
        [(green - blue) / spread % 6, (blue - red) / spread + 2],
        (red - green) / spread + 4,
    )
    return hue / 6, (high - low) / np.maximum(high, 1e-6), high


def _to_rgb(
    hue: NDArray[np.float32], saturation: NDArray[np.float32], value: NDArray[np.float32]
) -> NDArray[np.float32]:
    offsets = (np.array([5, 3, 1]) + 6 * hue[..., None]) % 6
    dip = np.clip(np.minimum(offsets, 4 - offsets), 0, 1)
    rgb: NDArray[np.float32] = value[..., None] * (1 - saturation[..., None] * dip)
    return rgb


def fetch_sprites(folder: Path) -> Sprites:
    """The sprites in `folder`, fetched and unpacked there at the first call."""
    if not (folder / "codes.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for package in (FLUENT, NOTO):  # the one with codes.json, which marks success, last
            with fetched(package, folder) as archive:
                unpack(archive, folder)
    return Sprites(folder)


def unpack(archive: Path, folder: Path) -> None:
    """Extract the sprites, and emoji.json's names as codes.json, from a package's archive."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path, stream = Path(member.name), tar.extractfile(member)
            if stream is None:
                continue
            if path.name == "emoji.json":
                entries = json.loads(stream.read())
                names = {
                    name: entry["unified"].lower()
                    for entry in entries
                    for name in entry["short_names"]
                }
                (folder / "codes.json").write_text(json.dumps(names), encoding="utf-8")
            style = "3d" if path.suffix == ".webp" else "flat"
            is_sprite = style == "3d" or path.parts[-3:-1] == ("google", "64")
            if path.suffix in (".webp", ".png") and is_sprite and "1f3f" not in path.stem[5:]:
                (folder / style).mkdir(exist_ok=True)
                (folder / style / path.name).write_bytes(stream.read())

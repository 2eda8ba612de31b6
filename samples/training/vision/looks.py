"""Emoji of five styles: four for training and one held out.

Owns the packages beside `pictures.sprites`'s two, and the rendering of SVG files as sprites.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import resvg_py
from pictures.compositions import Catalogue
from pictures.fetching import fetched
from pictures.sprites import Sprites, fetch_sprites

from triptych.core.weights.npm import NpmPackage

LOOKS = ("3d", "flat", "fluent-flat", "fluent-modern")
"""Styles of training images."""
UNSEEN_LOOK = "twemoji"
"""The held-out style, for evaluation only."""
SVG_PACKAGES = {
    "fluent-flat": NpmPackage(
        name="@lobehub/fluent-emoji-flat",
        version="1.1.0",
        sha256="8f9113c027c7c20eced0070354715a4093a459b8bef6332b91d45f38c9bdb147",
    ),
    "fluent-modern": NpmPackage(
        name="@lobehub/fluent-emoji-modern",
        version="1.0.0",
        sha256="080906de394ad8335c24f67e1b33f12a9ac1b6d99324d26ae63cad8d27359769",
    ),
}
"""Microsoft's Fluent emoji, flat and modern (MIT)."""
TWEMOJI = NpmPackage(
    name="emoji-datasource-twitter",
    version="16.0.0",
    sha256="f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
)
"""Twitter's emoji, 64 pixels (CC-BY-4.0)."""
_SIDE = 192


class Looks(Sprites):
    """Sprites of all styles, by style and code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for style in (*LOOKS[2:], UNSEEN_LOOK):
            files = sorted((folder / style).glob("*.png"))
            self._files[style] = {file.stem: file for file in files}

    def has(self, style: str, code: str) -> bool:
        """Whether a style has an emoji."""
        return code in self._files[style]


def fetch_looks(folder: Path, catalogue: Catalogue) -> Looks:
    """The sprites in `folder`, fetched and unpacked there at the first call."""
    plain = fetch_sprites(folder)
    looks = {name for others in catalogue.other_sprites.values() for name in others.values()}
    codes = {plain.code(emoji) for emoji in {*catalogue.sprites.values(), *looks}}
    for style, package in {**SVG_PACKAGES, UNSEEN_LOOK: TWEMOJI}.items():
        if (folder / style).is_dir():
            continue
        with fetched(package, folder) as archive:
            partial = folder / f"{style}.part"
            partial.mkdir(exist_ok=True)
            _unpack(archive, partial, codes)
            partial.rename(folder / style)
    return Looks(folder)


def _unpack(archive: Path, folder: Path, codes: set[str]) -> None:
    """The emoji of `codes` as PNG files. One package's names lack the dot before "svg"."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = Path(member.name)
            is_svg = path.name.endswith("svg")
            code = path.name.removesuffix("svg").rstrip(".") if is_svg else path.stem
            stream = tar.extractfile(member) if code in codes else None
            if stream is None or not (is_svg or path.suffix == ".png"):
                continue
            content = stream.read()
            if is_svg:
                text = content.decode("utf-8")
                content = bytes(resvg_py.svg_to_bytes(svg_string=text, width=_SIDE))
            (folder / f"{code}.png").write_bytes(content)

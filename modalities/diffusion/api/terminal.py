"""Images in a terminal: by a graphics protocol if it has one, else as coloured half blocks.

Owns which terminals support which protocol. Knows no model.

Formats: kitty's graphics protocol (sw.kovidgoyal.net/kitty/graphics-protocol), iTerm2's inline
images (iterm2.com/documentation-images.html).
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from PIL import Image
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import ControlType, Segment
from rich.style import Style

Display = Literal["auto", "blocks", "kitty", "iterm2", "off"]
DISPLAYS: tuple[Display, ...] = get_args(Display)

_KITTY = frozenset({"xterm-kitty", "xterm-ghostty"})
_ITERM2 = frozenset({"iTerm.app", "WezTerm"})
_CHUNK = 4096  # maximum characters in one kitty command
_IMAGE_ID = 7314
_MAX_ACROSS = 5
_MAX_COLUMNS = 40  # for one image
_SPARE_ROWS = 4  # for the progress bar and earlier output
_MAX_SIDE = 512  # largest side of an image sent to a terminal, in pixels
_EMPTY = (40, 40, 40)
_NO_WIDTH = ((ControlType.CURSOR_FORWARD, 0),)  # marks a segment of no width


def choose_display(wanted: Display, console: Console, environ: Mapping[str, str]) -> Display:
    """How to show images: as `wanted`, or as the terminal can; `off` without a terminal."""
    if not console.is_terminal or console.is_dumb_terminal:
        return "off"
    if wanted != "auto":
        return wanted
    program = environ.get("TERM_PROGRAM", "")
    if {"TMUX", "STY"} & environ.keys():
        return "blocks"  # tmux and screen pass no images through
    if environ.get("TERM") in _KITTY or "KITTY_WINDOW_ID" in environ or program == "ghostty":
        return "kitty"
    if program in _ITERM2 or environ.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    return "blocks" if console.color_system else "off"


class ImageStrip:
    """The latest images of a call side by side, as a rich renderable.

    It may be rendered repeatedly in place, as `rich.live` does.
    """

    def __init__(self, num_images: int, display: Display) -> None:
        self.num_images = num_images
        self._tiles: list[Image.Image | None] = [None] * num_images
        self._display = display
        self._across = min(num_images, _MAX_ACROSS)
        self._is_new = False

    def show(self, index: int, image: Image.Image) -> None:
        """Set the image, or its preview, at an index."""
        self._tiles[index] = image
        self._is_new = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render nothing until there is an image."""
        if self._display == "off" or not any(self._tiles):
            return
        columns, rows = self._cells(options)
        if self._display == "blocks":
            yield from half_blocks(self._canvas((columns, 2 * rows)))
            return
        # kitty keeps an image when lines below it are cleared; iTerm2 does not.
        is_due = self._is_new or self._display == "iterm2"
        self._is_new = False
        for row in range(rows):
            if row == rows - 1 and is_due:
                yield Segment(self._command(columns, rows), None, _NO_WIDTH)
            yield Segment.line()

    @property
    def _shape(self) -> tuple[int, int]:
        """The size of the whole strip in pixels, scaled to its largest image."""
        tiles = [tile for tile in self._tiles if tile is not None]
        largest = max(tiles, key=lambda tile: tile.width)
        down = math.ceil(self.num_images / self._across)
        return self._across * largest.width, down * largest.height

    def _cells(self, options: ConsoleOptions) -> tuple[int, int]:
        """Columns and rows of the terminal: a cell is twice as high as wide."""
        width, height = self._shape
        columns = min(options.max_width, self._across * _MAX_COLUMNS)
        most = max(1, options.size.height - _SPARE_ROWS)
        rows = min(most, max(1, round(columns * height / width / 2)))
        return min(columns, max(1, round(2 * rows * width / height))), rows

    def _canvas(self, size: tuple[int, int]) -> Image.Image:
        """Paste all tiles on one image of this size."""
        canvas = Image.new("RGB", size, _EMPTY)
        down = math.ceil(self.num_images / self._across)
        for index, tile in enumerate(self._tiles):
            row, column = divmod(index, self._across)
            left, right = (size[0] * (column + side) // self._across for side in (0, 1))
            top, bottom = (size[1] * (row + side) // down for side in (0, 1))
            if tile is not None and right > left and bottom > top:
                canvas.paste(tile.resize((right - left, bottom - top)), (left, top))
        return canvas

    def _command(self, columns: int, rows: int) -> str:
        """Move the cursor to the first row, show the image, and restore the cursor."""
        width, height = self._shape
        scale = min(1.0, _MAX_SIDE * self._across / width)
        file = io.BytesIO()
        self._canvas((round(width * scale), round(height * scale))).save(file, "png")
        show = kitty_command if self._display == "kitty" else iterm2_command
        back = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\x1b7{back}\r{show(file.getvalue(), columns, rows)}\x1b8"


def half_blocks(image: Image.Image) -> Iterator[Segment]:
    """Render an RGB image with two pixels per cell, one above the other."""
    rgb, stride = image.tobytes(), 3 * image.width
    for start in range(0, stride * (image.height // 2 * 2), 2 * stride):
        for place in range(start, start + stride, 3):
            top, bottom = rgb[place : place + 3], rgb[place + stride : place + stride + 3]
            style = Style(color=Color.from_rgb(*top), bgcolor=Color.from_rgb(*bottom))
            yield Segment("▀", style)
        yield Segment.line()


def kitty_command(png: bytes, columns: int, rows: int) -> str:
    """The command that shows a PNG at the cursor, in place of the previous one."""
    data = base64.b64encode(png).decode()
    parts = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    head = f"a=T,f=100,i={_IMAGE_ID},p=1,c={columns},r={rows},C=1,q=2,"
    commands = []
    for index, part in enumerate(parts):
        has_more = int(index < len(parts) - 1)
        commands.append(f"\x1b_G{head if index == 0 else ''}m={has_more};{part}\x1b\\")
    return "".join(commands)


def iterm2_command(png: bytes, columns: int, rows: int) -> str:
    """The command that shows a PNG at the cursor, which does not move."""
    shape = f"size={len(png)};width={columns};height={rows};preserveAspectRatio=0"
    data = base64.b64encode(png).decode()
    return f"\x1b]1337;File=inline=1;{shape};doNotMoveCursor=1:{data}\x07"

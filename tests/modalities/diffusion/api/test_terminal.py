"""Images in terminals: which way, how large, and the bytes of each protocol."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from rich.live import Live

from support.images import image, saved
from triptych.modalities.diffusion.api.terminal import (
    Display,
    ImageStrip,
    choose_display,
    half_blocks,
    iterm2_command,
    kitty_command,
)

RED, BLUE = (255, 0, 0), (0, 0, 255)


def console(*, is_terminal: bool = True, **options: Any) -> Console:
    settings = {"width": 80, "height": 24, "color_system": "truecolor", "_environ": {}}
    return Console(file=io.StringIO(), force_terminal=is_terminal, **{**settings, **options})


def printed(strip: ImageStrip, target: Console) -> str:
    file = target.file
    assert isinstance(file, io.StringIO)
    file.seek(0)
    file.truncate()
    target.print(strip, end="")
    return file.getvalue()


def shown(size: tuple[int, int], display: Display, num_images: int = 1) -> ImageStrip:
    strip = ImageStrip(num_images, display)
    strip.show(0, Image.new("RGB", size, RED))
    return strip


@pytest.mark.parametrize(
    ("environ", "display"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, "blocks"),
        ({"TERM": "xterm-256color"}, "blocks"),
    ],
)
def test_a_terminal_is_known_by_its_environment(environ: dict[str, str], display: Display) -> None:
    assert choose_display("auto", console(), environ) == display
    assert choose_display("auto", console(is_terminal=False), environ) == "off"
    assert choose_display("blocks", console(is_terminal=False), environ) == "off"
    assert choose_display("blocks", console(), environ) == "blocks"
    assert choose_display("off", console(), environ) == "off"


def test_a_terminal_without_colours_shows_nothing() -> None:
    assert choose_display("auto", console(color_system=None), {}) == "off"


def test_half_blocks_hold_two_pixels_each() -> None:
    image = Image.new("RGB", (2, 4), RED)
    image.paste(BLUE, (0, 1, 2, 2))
    segments = list(half_blocks(image))
    assert [segment.text for segment in segments] == ["▀", "▀", "\n", "▀", "▀", "\n"]
    first = segments[0].style
    assert first is not None
    assert first.color is not None
    assert first.bgcolor is not None
    assert (tuple(first.color.triplet or ()), tuple(first.bgcolor.triplet or ())) == (RED, BLUE)


@pytest.mark.parametrize(
    ("size", "screen", "cells"),
    [
        ((64, 64), (80, 60), (40, 20)),
        ((64, 64), (80, 14), (20, 10)),
        ((64, 64), (12, 60), (12, 6)),
        ((128, 32), (80, 60), (40, 5)),
        ((32, 128), (80, 24), (10, 20)),
        ((512, 4), (80, 24), (40, 1)),
    ],
)
def test_an_image_keeps_its_shape_and_fits(
    size: tuple[int, int], screen: tuple[int, int], cells: tuple[int, int]
) -> None:
    target = console(width=screen[0], height=screen[1])
    lines = printed(shown(size, "blocks"), target).splitlines()
    assert (lines[0].count("▀"), len(lines)) == cells


def test_several_images_stand_next_to_each_other() -> None:
    strip = shown((64, 64), "blocks", num_images=2)
    strip.show(1, Image.new("RGB", (8, 8), BLUE))
    first = printed(strip, console()).splitlines()[0]
    assert first.count("38;2;255;0;0") == first.count("38;2;0;0;255") == 40
    ten = printed(shown((64, 64), "blocks", num_images=10), console()).splitlines()
    assert (ten[0].count("▀"), len(ten)) == (80, 16)


def test_nothing_is_shown_before_there_is_an_image() -> None:
    for display in ("blocks", "kitty"):
        assert printed(ImageStrip(1, display), console()) == ""  # type: ignore[arg-type]
    assert printed(shown((8, 8), "off"), console()) == ""


def test_kitty_gets_chunks_and_one_transmission_per_image() -> None:
    data = saved(image(300, 300))
    command = kitty_command(data, 20, 10)
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", command)
    assert parts[0][0].startswith("a=T,f=100,")
    assert ",c=20,r=10,C=1,q=2,m=" in parts[0][0]
    assert [head[-3:] for head, _ in parts] == ["m=1"] * (len(parts) - 1) + ["m=0"]
    assert all(len(part) <= 4096 for _, part in parts)
    assert base64.b64decode("".join(part for _, part in parts)) == data
    strip, target = shown((64, 64), "kitty"), console()
    assert printed(strip, target).count("\x1b_Ga=T") == 1
    assert "\x1b_G" not in printed(strip, target)
    strip.show(0, Image.new("RGB", (64, 64), BLUE))
    assert printed(strip, target).count("\x1b_Ga=T") == 1


def test_iterm2_gets_a_whole_image_each_time() -> None:
    data = saved(image())
    command = iterm2_command(data, 20, 10)
    assert command.startswith(f"\x1b]1337;File=inline=1;size={len(data)};width=20;height=10;")
    assert base64.b64decode(command.partition(":")[2].removesuffix("\x07")) == data
    strip, target = shown((64, 64), "iterm2"), console()
    assert [printed(strip, target).count("\x1b]1337") for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("display", ["kitty", "iterm2"])
def test_an_image_takes_the_rows_that_were_made_for_it(display: Display) -> None:
    target = console()
    text = printed(shown((64, 64), display), target)
    rows = text.count("\n")
    assert rows == 20
    before, _, rest = text.partition("\x1b7")
    assert before.count("\n") == rows - 1
    assert rest.startswith(f"\x1b[{rows - 1}A\r\x1b")
    assert rest.endswith("\x1b8\n")


def test_it_is_generated_over_itself() -> None:
    target = console()
    strip = shown((64, 64), "blocks")
    with Live(strip, console=target, auto_refresh=False) as live:
        live.refresh()
        strip.show(0, Image.new("RGB", (64, 64), BLUE))
        live.refresh()
    assert isinstance(target.file, io.StringIO)
    last = target.file.getvalue().rpartition("\x1b[1A")[2]
    assert "38;2;0;0;255" in last
    assert "38;2;255;0;0" not in last

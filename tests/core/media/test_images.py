"""Images as they are read: kinds, modes, turns, transparency, sizes, masks."""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis.strategies import integers, tuples
from PIL import Image

from support.images import apng, chunk, hole_mask, idat, image, many_scans, png, saved, turned
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InvalidRequest, PayloadTooLarge, UnsupportedMedia
from triptych.core.media import images
from triptych.core.media.child import DecodePool
from triptych.core.media.images import ImageLimits, ImageReader, measure, read_image

LIMITS = ImageLimits()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader() -> AsyncIterator[ImageReader]:
    pool = DecodePool([images.__name__])
    yield ImageReader(pool)
    await pool.close()


def as_array(pixels: Pixels | Image.Image) -> np.ndarray:
    if isinstance(pixels, Image.Image):
        return np.asarray(pixels).astype(int)
    raster = np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)
    return raster.astype(int)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
async def test_a_child_reads_each_kind(reader: ImageReader, kind: str) -> None:
    data = saved(image(300, 700), kind, **({} if kind == "png" else {"quality": 95}))
    assert await reader.measure(data, media_type=f"image/{kind}") == (300, 700)
    pixels = await reader.read(data, media_type=f"IMAGE/{kind.upper()}; q=1")
    assert (pixels.width, pixels.height) == (300, 700)
    error = np.abs(as_array(pixels) - as_array(image(300, 700)))
    assert error.max() <= (0 if kind == "png" else 12)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        grey = np.asarray(image(mode="L")).astype(np.uint16) * 257
        data = saved(Image.fromarray(grey))
    else:
        converted = image(mode="L" if mode == "LA" else "RGB").convert(mode)
        data = saved(converted, "jpeg" if mode == "CMYK" else "png")
    seen = read_image(data, limits=LIMITS)
    assert seen.mode == "RGB"
    if mode in ("L", "LA", "I;16"):
        error = as_array(seen) - as_array(image(mode="L").convert("RGB"))
        assert np.abs(error).max() <= 1


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_stands_upright(kind: str, orientation: int) -> None:
    data = turned(kind, orientation)
    upright = image() if orientation == 1 else image().transpose(images._TURNS[orientation])
    seen = read_image(data, limits=LIMITS)
    assert seen.size == upright.size == measure(data, limits=LIMITS)
    assert np.abs(as_array(seen) - as_array(upright)).mean() < 4
    small = (12, 24)
    scaled = read_image(data, limits=LIMITS, size=small)
    assert scaled.size == small


def test_nonsense_for_an_orientation_is_none() -> None:
    for value in (0, 9, 65_535):
        assert measure(turned("jpeg", value), limits=LIMITS) == (48, 32)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_transparency_shows_white(mode: str) -> None:
    image = Image.new(mode, (32, 32), 0)
    options: dict[str, Any] = {"transparency": 0} if mode in ("P", "L") else {}
    assert (as_array(read_image(saved(image, **options), limits=LIMITS)) == 255).all()


def test_half_transparency_is_blended() -> None:
    seen = read_image(saved(Image.new("RGBA", (32, 32), (255, 0, 0, 128))), limits=LIMITS)
    assert np.abs(as_array(seen) - np.array([255, 127, 127])).max() <= 1


def test_what_cannot_be_shown_as_meant_is_refused() -> None:
    hidden = png(32, 32, chunk(b"tRNS", b"\x00\x00"), idat(32 * 65), depth=16, colour=0)
    with pytest.raises(InvalidRequest, match="16-bit grey"):
        read_image(hidden, limits=LIMITS)


def test_of_moving_images_the_first_is_read() -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    for kind in ("png", "webp"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert as_array(read_image(data, limits=LIMITS))[0, 0].tolist() == [255, 0, 0]
    assert read_image(apng(50), limits=LIMITS).size == (64, 64)


_SIDES = integers(1, 4000)


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ((200, 90), (176, 79)),
        ((103, 191), (152, 62)),
        ((346, 574), (141, 113)),
        ((506, 481), (79, 52)),
    ],
)
def test_no_shape_is_cut_beyond_its_edges(sides: tuple[int, int], size: tuple[int, int]) -> None:
    """The last bit of a quotient put the cut outside, and the image was called damaged."""
    plain = saved(Image.new("RGB", sides, "red"), "PNG")
    assert read_image(plain, limits=ImageLimits(), size=size).size == size


@settings(max_examples=300, deadline=None)
@given(source=tuples(_SIDES, _SIDES), size=tuples(_SIDES, _SIDES))
def test_what_covers_a_size_is_a_part_of_its_source(
    source: tuple[int, int], size: tuple[int, int]
) -> None:
    left, top, right, bottom = images._crop_box(source, size)
    assert 0 <= left < right <= source[0]
    assert 0 <= top < bottom <= source[1]
    assert math.isclose((right - left) / (bottom - top), size[0] / size[1], rel_tol=1e-9)


def test_a_size_is_covered_and_cut_evenly() -> None:
    wide = Image.new("RGB", (96, 32), "red")
    wide.paste("blue", (32, 0, 64, 32))
    seen = as_array(read_image(saved(wide), limits=LIMITS, size=(16, 16)))
    assert (seen[:, 3:-3] == [0, 0, 255]).all()
    grown = read_image(saved(wide), limits=LIMITS, size=(192, 64))
    assert as_array(grown)[32, 96].tolist() == [0, 0, 255]


def test_large_jpegs_are_made_small_while_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = saved(image(2048, 1024), "jpeg", quality=95)
    loaded: list[tuple[int, int]] = []
    flattened = images._flatten
    monkeypatch.setattr(
        images, "_flatten", lambda file: loaded.append(file.size) or flattened(file)
    )
    seen = read_image(data, limits=LIMITS, size=(200, 100))
    assert loaded == [(256, 128)]
    wanted = image(2048, 1024).resize((200, 100), Image.Resampling.LANCZOS)
    assert np.abs(as_array(seen) - as_array(wanted)).mean() < 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_mask_is_what_is_transparent(reader: ImageReader) -> None:
    data = hole_mask(48, 32, (8, 4, 24, 20))
    whole = np.frombuffer(await reader.read_mask(data), np.uint8).reshape(32, 48)
    wanted = np.zeros((32, 48), np.uint8)
    wanted[4:20, 8:24] = 255
    assert np.array_equal(whole, wanted)
    half = np.frombuffer(await reader.read_mask(data, size=(24, 16)), np.uint8).reshape(16, 24)
    assert np.array_equal(half, wanted[::2, ::2])
    with pytest.raises(InvalidRequest, match="no transparency"):
        await reader.read_mask(saved(image()))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((8, 64), "at least 16 pixels"),
        ((64, 15), "at least 16 pixels"),
        ((8193, 16), "a side may have"),
        ((4096, 4096), "12500000"),
    ],
)
def test_the_header_decides(size: tuple[int, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        measure(png(*size), limits=LIMITS)
    with pytest.raises(InvalidRequest, match=message):
        read_image(png(*size), limits=LIMITS)


def test_measuring_decodes_nothing() -> None:
    assert measure(png(2048, 2048), limits=LIMITS) == (2048, 2048)
    late = png(64, 64, idat(64 * 193), chunk(b"eXIf", b"MM\x00*\x00\x00\x00\x08\x00\x00"))
    assert measure(late, limits=LIMITS) == read_image(late, limits=LIMITS).size


@pytest.mark.parametrize(
    ("claimed", "kind"),
    [("text/html", "png"), ("video/mp4", "webp"), ("application/json", "jpeg")],
)
def test_what_is_sent_as_no_image_is_refused(claimed: str, kind: str) -> None:
    with pytest.raises(UnsupportedMedia, match=f"image/{kind}"):
        measure(saved(image(), kind), limits=LIMITS, media_type=claimed)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
@pytest.mark.parametrize(
    "claimed",
    ["", "application/octet-stream", "image/png", "image/jpeg", "image/jpg", "image/webp",
     "image/gif", "IMAGE/PNG; name=a.png"],
)  # fmt: skip
def test_the_bytes_say_which_kind_of_image_it_is(claimed: str, kind: str) -> None:
    assert measure(saved(image(), kind), limits=LIMITS, media_type=claimed) == (48, 32)


def test_painting_over_and_over_is_refused() -> None:
    read_image(saved(image(64, 64), "jpeg", progressive=True), limits=LIMITS)
    with pytest.raises(InvalidRequest, match="scans"):
        measure(many_scans(64), limits=LIMITS)


def test_text_that_grows_is_refused() -> None:
    text = chunk(b"zTXt", b"note\x00\x00" + zlib.compress(bytes(8 * 2**20), 9))
    with pytest.raises(InvalidRequest, match="damaged"):
        read_image(png(32, 32, text, idat(32 * 97)), limits=LIMITS)


@pytest.mark.asyncio(loop_scope="module")
async def test_too_many_bytes_never_reach_a_child(reader: ImageReader) -> None:
    with pytest.raises(PayloadTooLarge):
        await reader.measure(bytes(100), limits=ImageLimits(max_bytes=99))


@pytest.mark.parametrize("alpha", [255, 254, 200, 128])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
async def test_a_mask_that_masks_nothing_is_refused(
    reader: ImageReader, mode: str, alpha: int
) -> None:
    mask = Image.new("RGBA", (48, 32), (255, 255, 255, alpha)).convert(mode)
    with pytest.raises(InvalidRequest, match="opaque everywhere"):
        await reader.read_mask(saved(mask))


@pytest.mark.parametrize("alpha", [0, 1, 127])
async def test_less_than_half_opaque_is_masked(reader: ImageReader, alpha: int) -> None:
    mask = Image.new("RGBA", (48, 32), (0, 0, 0, alpha))
    assert set(await reader.read_mask(saved(mask))) == {255}


@pytest.mark.parametrize(("size", "canvas"), [((40, 30), (48, 32)), ((48, 20), (48, 32))])
async def test_a_canvas_is_filled_by_the_edges(
    reader: ImageReader, size: tuple[int, int], canvas: tuple[int, int]
) -> None:
    for data in (saved(image(96, 64)), turned("png", 6, 96, 64)):
        plain = await reader.read(data, size=size)
        full = await reader.read(data, size=size, canvas=canvas)
        assert (full.width, full.height) == canvas
        plain_HWC = np.frombuffer(plain.rgb, np.uint8).reshape(size[1], size[0], 3)
        full_HWC = np.frombuffer(full.rgb, np.uint8).reshape(canvas[1], canvas[0], 3)
        edges = [(0, canvas[1] - size[1]), (0, canvas[0] - size[0]), (0, 0)]
        np.testing.assert_array_equal(full_HWC, np.pad(plain_HWC, edges, mode="edge"))
        assert full.crop(*size) == plain


@pytest.mark.parametrize("side", [1, 2, 7, 30])
async def test_however_little_a_mask_marks_something_is_drawn(
    reader: ImageReader, side: int
) -> None:
    at = 1000
    data = hole_mask(2048, 1024, (at, at // 2, at + side, at // 2 + side))
    for size in ((2048, 1024), (128, 64), (32, 16)):
        mask = np.frombuffer(await reader.read_mask(data, size=size), np.uint8).reshape(size[::-1])
        assert set(np.unique(mask)) == {0, 255}
        rows, columns = np.nonzero(mask)
        scale = size[0] / 2048
        assert np.abs(rows - at / 2 * scale).max() <= side * scale + 1
        assert np.abs(columns - at * scale).max() <= side * scale + 1


async def test_a_mask_whose_hole_is_cut_off_is_refused(reader: ImageReader) -> None:
    data = hole_mask(300, 100, (0, 0, 40, 100))
    with pytest.raises(InvalidRequest, match="cut off"):
        await reader.read_mask(data, size=(100, 100))
    assert await reader.read_mask(data, size=(150, 50))

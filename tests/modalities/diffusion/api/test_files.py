"""Images as files, and the store of those answered as links."""

from __future__ import annotations

import numpy as np
import pytest

from support.image_app import opened, plain
from support.images import image
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.api.files import (
    MEDIA_TYPES,
    ImageKind,
    encode_image,
    to_image,
    to_pixels,
)
from triptych.modalities.diffusion.api.links import ID_CHARS, ImageStore

GRADIENT = Pixels(width=96, height=64, rgb=image(96, 64).tobytes())


@pytest.mark.parametrize("kind", MEDIA_TYPES)
def test_a_file_holds_the_pixels_and_nothing_else(kind: ImageKind) -> None:
    decoded = opened(encode_image(GRADIENT, kind=kind))
    assert (decoded.format, decoded.size, decoded.mode) == (kind.upper(), (96, 64), "RGB")
    error = np.asarray(decoded).astype(int) - np.asarray(image(96, 64))
    assert np.abs(error).max() <= (0 if kind == "png" else 8)
    assert set(decoded.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "loop"} | {
        "background", "timestamp", "duration",
    }  # fmt: skip
    assert not decoded.getexif()


def test_a_transparent_image_stays_so_or_stands_on_white() -> None:
    half = Pixels(width=16, height=8, rgb=b"\x10" * (3 * 128), alpha=b"\xff" * 64 + bytes(64))
    kept = opened(encode_image(half))
    assert (kept.mode, kept.getpixel((0, 0)), kept.getpixel((0, 7))[3]) == (
        "RGBA",
        (16, 16, 16, 255),
        0,
    )
    assert to_pixels(kept) == half == to_pixels(to_image(half))
    for opaque in (encode_image(half, keeps_alpha=False), encode_image(half, kind="jpeg")):
        shown = opened(opaque)
        assert shown.mode == "RGB"
        assert min(shown.getpixel((15, 7))) > 250
        assert max(shown.getpixel((0, 0))) < 30
    assert half.crop(8, 4) == Pixels(width=8, height=4, rgb=half.rgb[:96], alpha=b"\xff" * 32)


def test_a_file_is_the_same_every_time() -> None:
    assert encode_image(GRADIENT) == encode_image(GRADIENT)


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_compression_is_quality(kind: ImageKind) -> None:
    sizes = [len(encode_image(GRADIENT, kind=kind, compression=q)) for q in (0, 30, 70, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 2


def test_a_small_preview_grows() -> None:
    image = opened(encode_image(plain(8, 8, (1, 2, 3)), size=(64, 32)))
    assert (image.size, image.getpixel((63, 31))) == ((64, 32), (1, 2, 3))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_kept_image_is_its_owners_for_a_while() -> None:
    store = ImageStore(max_bytes=100, ttl_s=10, clock=(clock := Clock()))
    image_id = store.add(b"data", "png", "ann")
    assert len(image_id) == ID_CHARS
    found = store.find(image_id, "ann")
    assert found is not None
    assert (found.data, found.kind) == (b"data", "png")
    assert store.find(image_id, "bob") is None
    assert store.find(image_id[:-1], "ann") is None
    clock.now_s = 9.9
    assert store.find(image_id, "ann") is not None
    clock.now_s = 10.0
    assert store.find(image_id, "ann") is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_oldest_give_way() -> None:
    store = ImageStore(max_bytes=100, ttl_s=10)
    ids = [store.add(bytes(30), "png", "") for _ in range(5)]
    assert store.num_bytes == 90
    assert [store.find(image_id, "") is not None for image_id in ids] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert len(set(ids)) == 5
    store.add(bytes(100), "png", "")
    assert len(store) == 1
    with pytest.raises(InvalidRequest, match="b64_json"):
        store.add(bytes(101), "png", "")


def test_a_store_without_room_refuses() -> None:
    with pytest.raises(InvalidRequest):
        ImageStore(max_bytes=0, ttl_s=10).add(b"x", "png", "")

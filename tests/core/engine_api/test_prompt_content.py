"""Names of images: equal where features are, and only there."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.prompt_content import (
    Array,
    ContentSpan,
    PromptContent,
    content_digest,
    content_ids,
)

NAMED = {"settings": "s", "model": "m", "adapter": "a"}


def array(data: bytes = bytes(6), shape: tuple[int, ...] = (2, 3)) -> Array:
    return Array("uint8", shape, data)


def test_all_that_features_come_from_is_in_the_digest() -> None:
    plain = {"pixel_values": array()}
    digests = {content_digest(plain, **NAMED)}
    digests |= {content_digest(plain, **NAMED | {name: "other"}) for name in NAMED}
    digests.add(content_digest({"pixel_values": array(shape=(3, 2))}, **NAMED))
    digests.add(content_digest({"pixel_values": array(b"\1" * 6)}, **NAMED))
    digests.add(content_digest({"other": array()}, **NAMED))
    digests.add(content_digest({"pixel_values": Array("int64", (2, 3), bytes(6))}, **NAMED))
    assert len(digests) == 8
    assert all(len(digest) == 32 for digest in digests)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 200))
def test_ids_are_those_of_no_text_and_the_same_every_time(digest: bytes, number: int) -> None:
    ids = content_ids(digest, number)
    assert ids == content_ids(digest, number)
    assert len(set(ids)) == number
    assert all(FIRST_FRAME_ID < one < 2**63 for one in ids)


def test_a_mark_says_which_features_fill_which_positions() -> None:
    span = ContentSpan(digest=b"d" * 32, runs=((3, 2), (7, 4)))
    assert (span.start, span.end, span.num_features) == (3, 11, 6)
    assert span.mark(0, 3) == span.mark(5, 7) == span.mark(11, 20) == b""
    assert len({span.mark(start, start + 4) for start in range(9)}) == 9
    moved = ContentSpan(digest=b"d" * 32, runs=((4, 2), (8, 4)))
    assert span.mark(0, 8) != moved.mark(0, 8)
    assert span.mark(0, 8) == moved.mark(1, 9)


def test_images_cross_the_wire() -> None:
    span = ContentSpan(digest=b"d" * 32, runs=((3, 2),), grid=(1, 2))
    image = PromptContent(span=span, inputs={"pixel_values": array()})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(image), type=PromptContent) == image

"""Data URLs are taken out of a body while it arrives, in whatever pieces it comes."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest, Overloaded, PayloadTooLarge
from triptych.core.http.data_urls import IN_DATA_URLS, DataUrls, FilePlace
from triptych.core.http.upload import UploadBudget
from triptych.core.media.fetch import Fetched

BUDGET = 2**20


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


IN_LISTS = FilePlace(
    re.compile(rb'"images"\s{0,8}:\s{0,8}\[\s{0,64}"'),
    following=re.compile(rb'"\s{0,64},\s{0,64}"'),
    least=40,
)


def read(
    raw: bytes, size: int, *, max_json_bytes: int = 2**16, place: FilePlace = IN_DATA_URLS
) -> tuple[Any, DataUrls]:
    urls = DataUrls(UploadBudget(BUDGET), max_json_bytes=max_json_bytes, place=place)
    for start in range(0, len(raw), size):
        urls.take(raw[start : start + size])
    return json.loads(urls.finish()), urls


@given(
    files=st.lists(st.binary(max_size=300), max_size=4),
    text=st.text(max_size=200),
    size=st.integers(1, 400),
    indent=st.sampled_from((None, 2)),
    is_escaped=st.booleans(),
)
def test_files_and_the_rest_are_as_sent(
    files: list[bytes], text: str, size: int, indent: int | None, is_escaped: bool
) -> None:
    parts = [{"image_url": {"url": url(file), "detail": text}} for file in files]
    raw = json.dumps([text, url(b"text" * 30), parts], indent=indent)
    if is_escaped:
        raw = raw.replace("/", "\\/")
    (first, second, found), urls = read(raw.encode(), size)
    assert (first, second) == (text, url(b"text" * 30))
    assert [part["image_url"]["detail"] for part in found] == [text] * len(files)
    for part, file in zip(found, files, strict=True):
        assert urls.find(part["image_url"]["url"]) == Fetched(file, "image/png")


@given(text=st.sampled_from(('"url":"', 'x"url": "data:image/png;base64,AAAA', "\\", '\\"url"')))
def test_text_that_looks_like_a_field_stays_text(text: str) -> None:
    raw = json.dumps({"text": text + url(b"abc"), "url": 7})
    found, urls = read(raw.encode(), 11)
    assert found == json.loads(raw)
    assert urls.find(text) is None


@pytest.mark.parametrize("body", ["AAA", "A", "AA=A", "====", "AAAA=AAA", "AA==AAAA"])
@pytest.mark.parametrize("size", [1, 100])
def test_what_is_no_base64_is_refused(body: str, size: int) -> None:
    with pytest.raises(InvalidRequest, match="base64"):
        read(b'{"url":"data:image/png;base64,' + body.encode() + b'"}', size)


def test_junk_after_a_file_stays_in_the_url_and_finds_nothing() -> None:
    found, urls = read(b'{"url":"data:image/png;base64,AAAA!AAAA"}', 100)
    assert found["url"].endswith("!AAAA")
    assert urls.find(found["url"]) is None


@given(
    lists=st.lists(st.lists(st.binary(max_size=90) | st.text('ab/" ,é', max_size=19), max_size=3)),
    size=st.integers(1, 300),
    indent=st.sampled_from((None, 2)),
    is_escaped=st.booleans(),
)
def test_lists_of_files_are_as_sent(
    lists: list[list[bytes | str]], size: int, indent: int | None, is_escaped: bool
) -> None:
    """Long base64 is taken out of its place, and everything else is left."""
    texts = [
        [base64.b64encode(file).decode() if isinstance(file, bytes) else file for file in files]
        for files in lists
    ]
    body = [{"images": each, "text": '"images": ["' + "A" * 80, "url": "A" * 80} for each in texts]
    raw = json.dumps(body, indent=indent)
    if is_escaped:
        raw = raw.replace("/", "\\/")
    found, urls = read(raw.encode(), size, place=IN_LISTS)
    assert json.loads(urls.restore(json.dumps(found))) == body
    for files, part in zip(lists, found, strict=True):
        assert (part["text"], part["url"]) == (body[0]["text"], body[0]["url"])
        for file, image in zip(files, part["images"], strict=True):
            taken = urls.find(f"data:image/png;base64,{image}")
            if isinstance(file, bytes) and len(file) > 27:
                assert taken == Fetched(file, "image/png")
            elif isinstance(file, str) or len(file) < 15:  # escapes make the others long enough
                assert taken is None


def test_a_client_cannot_name_another_file() -> None:
    _, urls = read(json.dumps({"url": url(b"abc")}).encode(), 100)
    assert urls.find("data:image/png;base64,0") is None
    assert urls.find("") is None


def test_bounds() -> None:
    with pytest.raises(PayloadTooLarge, match="50 bytes"):
        read(b'{"a":"' + b"x" * 2000 + b'"}', 100, max_json_bytes=50)
    with pytest.raises(PayloadTooLarge, match="50 bytes"):
        read(b'{"a":"' + b"x" * 60 + b'"}', 100, max_json_bytes=50)
    with pytest.raises(Overloaded):
        read(json.dumps({"url": url(bytes(BUDGET))}).encode(), 2**16)
    with pytest.raises(InvalidRequest, match="data URLs"):
        read(json.dumps([{"url": url(b"")}] * 1025).encode(), 2**16, max_json_bytes=2**20)


def test_what_is_held_counts_as_long_as_it_exists() -> None:
    budget = UploadBudget(BUDGET)
    urls = DataUrls(budget, max_json_bytes=100)
    urls.take(json.dumps({"url": url(bytes(3000))}).encode())
    assert budget.num_bytes > 4000
    del urls
    assert budget.num_bytes == 0

"""Data URLs are taken out of a body while it arrives, in whatever pieces it comes."""

from __future__ import annotations

import base64
import json
import re
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
from hypothesis import example, given
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
    images=frozenset({("images",)}),
    field="images",
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
def test_what_is_no_base64_is_no_image_but_a_text(body: str, size: int) -> None:
    raw = json.dumps({"url": f"data:image/png;base64,{body}"})
    found, urls = read(raw.encode(), size)
    with pytest.raises(InvalidRequest, match="base64") as error:
        urls.find(found["url"])
    assert error.value.param == "url"
    assert urls.put_back(found) == json.loads(raw)


@pytest.mark.parametrize("text", ["AB==", "AAF=", "AAAAAB==", "AAAAA", "A", "AA=A", "AA==AAAA/+"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_text_is_as_sent_to_its_last_character(text: str, size: int) -> None:
    """Its last bits may say nothing as base64, and are there all the same."""
    text = "/AAA" * 20 + text
    raw = json.dumps({"schema": {"images": [text, "x"]}}).replace("/", "\\/")
    found, urls = read(raw.encode(), size, place=IN_LISTS)
    assert text not in str(found)
    assert urls.put_back(found) == json.loads(raw)


def broken(text: str, sep: str, every: int) -> str:
    """The text with something in between that is no base64."""
    return sep.join(text[at : at + every] for at in range(0, len(text), every)) + sep


@given(
    data=st.binary(min_size=1, max_size=300),
    sep=st.sampled_from(("\n", "\r\n", " ", "\n\t", "%0A", "%0d%0a", "%20")),
    every=st.integers(1, 76),
    size=st.integers(1, 400),
    is_quoted=st.booleans(),
)
def test_base64_may_be_broken_into_lines_and_escaped_as_urls_are(
    data: bytes, sep: str, every: int, size: int, is_quoted: bool
) -> None:
    plain = base64.b64encode(data).decode()
    if is_quoted:
        plain, every = quote(plain, safe=""), len(plain) * 3
    said = f"data:image/png;base64,{broken(plain, sep, every)}"
    part = {"type": "image_url", "image_url": {"url": said}}
    body = {"messages": [{"content": [part]}], "text": {"url": said}}
    found, urls = read(json.dumps(body).encode(), size)
    fetched = urls.find(found["messages"][0]["content"][0]["image_url"]["url"])
    assert fetched is not None
    assert bytes(fetched.data) == data
    assert urls.put_back(found)["text"]["url"] == said
    urls.close()


def test_files_stay_where_images_are_read() -> None:
    data = "A" * 40
    body = {"images": [data], "schema": {"images": [data], "x": [{"images": [data]}]}}
    found, urls = read(json.dumps(body).encode(), 100, place=IN_LISTS)
    whole = urls.put_back(found)
    assert whole["schema"] == body["schema"]
    assert whole["images"] == found["images"] != body["images"]
    assert urls.find(f"data:;base64,{whole['images'][0]}") == Fetched(bytes(30), "")


def test_escapes_behind_a_file_do_not_name_another() -> None:
    raw = b'["url", {"url":"data:image/png;base64,AAAA\\u0031"}, {"url":"data:;base64,AAAA"}]'
    found, urls = read(raw, 100)
    assert urls.find(found[1]["url"]) is None
    assert urls.put_back(found) == json.loads(raw)


class WatchedUrls(DataUrls):
    """Counts steps, and the bytes that are not read yet."""

    num_steps = 0
    rests: ClassVar[list[bytes]] = []

    def _step(self) -> bool:
        self.num_steps += 1
        self.rests.append(self._rest)
        return super()._step()


def test_a_piece_is_not_copied_for_each_file_place() -> None:
    urls = WatchedUrls(UploadBudget(BUDGET), max_json_bytes=BUDGET, place=IN_LISTS)
    urls.rests.clear()
    urls.take(b'{"images":["' + b'","'.join([b"a"] * 1000) + b'"]}')
    assert urls.num_steps > 1000
    assert len(set(map(id, urls.rests))) == 1


def test_places_of_files_are_counted() -> None:
    """Texts that are too short for files cost steps, too."""
    urls = WatchedUrls(UploadBudget(BUDGET), max_json_bytes=BUDGET, place=IN_LISTS)
    with pytest.raises(InvalidRequest, match="1024 files") as error:
        urls.take(b'{"images":["' + b'","'.join([b"a"] * 100_000) + b'"]}')
    assert urls.num_steps < 5000
    assert error.value.param == "images"


def test_junk_after_a_file_stays_in_the_url_and_finds_nothing() -> None:
    found, urls = read(b'{"url":"data:image/png;base64,AAAA!AAAA"}', 100)
    assert found["url"].endswith("!AAAA")
    assert urls.find(found["url"]) is None


@example(lists=[[",", bytes(28)]], size=1, indent=None, is_escaped=False)
@given(
    lists=st.lists(st.lists(st.binary(max_size=90) | st.text('ab/" ,é', max_size=19), max_size=3)),
    size=st.integers(1, 300),
    indent=st.sampled_from((None, 2)),
    is_escaped=st.booleans(),
)
def test_lists_of_files_are_as_sent(
    lists: list[list[bytes | str]], size: int, indent: int | None, is_escaped: bool
) -> None:
    """Long base64 is taken out of its place, and everything else is left.

    What follows a text that is no base64 is left, too: a list with one is no list of files.
    """
    texts = [
        [base64.b64encode(file).decode() if isinstance(file, bytes) else file for file in files]
        for files in lists
    ]
    body = [{"images": each, "text": '"images": ["' + "A" * 80, "url": "A" * 80} for each in texts]
    raw = json.dumps(body, indent=indent)
    if is_escaped:
        raw = raw.replace("/", "\\/")
    found, urls = read(raw.encode(), size, place=IN_LISTS)
    assert urls.put_back({"text": found}) == {"text": body}
    for files, part in zip(lists, found, strict=True):
        assert (part["text"], part["url"]) == (body[0]["text"], body[0]["url"])
        is_list_of_files = True
        for file, image in zip(files, part["images"], strict=True):
            taken = urls.find(f"data:image/png;base64,{image}")
            is_list_of_files &= isinstance(file, bytes) or not set(file) & set('" ,é')
            if isinstance(file, bytes) and len(file) > 27 and is_list_of_files:
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
    with pytest.raises(InvalidRequest, match="1024 files"):
        read(json.dumps([{"url": url(b"")}] * 1025).encode(), 2**16, max_json_bytes=2**20)


def test_what_is_held_counts_as_long_as_it_exists() -> None:
    budget = UploadBudget(BUDGET)
    urls = DataUrls(budget, max_json_bytes=100)
    urls.take(json.dumps({"url": url(bytes(3000))}).encode())
    assert budget.num_bytes > 4000
    del urls
    assert budget.num_bytes == 0

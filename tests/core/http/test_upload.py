"""Forms with files: what is read, what is refused, wherever the bytes are cut."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request

from triptych.core.errors import (
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    UnsupportedMedia,
)
from triptych.core.http.upload import Form, UploadBudget, form_body, read_form
from triptych.core.limits import MAX_FORM_FIELD_BYTES, MAX_FORM_PARTS
from triptych.core.options.config import ServerOptions

FORM = "multipart/form-data; boundary=XyZ"


def part(name: str, value: bytes, *, filename: str | None = None, headers: str = "") -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'Content-Disposition: form-data; name="{name}"{file}\r\n{headers}\r\n'
    return b"--XyZ\r\n" + head.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--XyZ--\r\n"


async def read(
    *chunks: bytes,
    content_type: str = FORM,
    max_bytes: int = 10**6,
    budget: UploadBudget | None = None,
    **headers: str,
) -> Form:
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    app = Starlette()
    app.state.options = ServerOptions(max_upload_bytes=max_bytes)
    app.state.upload_budget = budget or UploadBudget(10**7)
    given = {"content-type": content_type, **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    return await read_form(Request({"type": "http", "app": app, "headers": raw}, receive))


@given(
    st.binary(max_size=300),
    st.dictionaries(st.text(st.characters(categories=["L", "N"]), min_size=1), st.text()),
    st.lists(st.integers(1, 400), max_size=10),
)
async def test_a_form_reads_the_same_wherever_it_is_cut(data, fields, sizes):
    whole = form(
        part("the file", data, filename="a.wav", headers="Content-Type: audio/wav\r\n"),
        *(part(name, text.encode("utf-8", "replace")) for name, text in fields.items()),
    )
    chunks, start = [], 0
    for size in sizes:
        chunks.append(whole[start : start + size])
        start += size
    read_back = await read(*chunks, whole[start:])
    assert read_back.file("the file").data == data
    assert read_back.file("file", "the file").filename == "a.wav"
    assert read_back.fields == {
        name: text.encode("utf-8", "replace").decode() for name, text in fields.items()
    }


async def test_a_field_in_brackets_is_a_list():
    whole = form(part("sizes[]", b"1"), part("sizes[]", b"2"), part("one[]", b"3"))
    assert (await read(whole)).fields == {"sizes[]": ["1", "2"], "one[]": ["3"]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((part("a", b"1"), part("a", b"2")), "Duplicate field a"),
        ((part("a", b"1", filename="x"), part("a", b"2", filename="x")), "Duplicate"),
        ((part("a", b"1"), part("a", b"2", filename="x")), "Duplicate"),
        ((part("a", b"1", filename="x"), part("a", b"2")), "Duplicate"),
        ((part("a[]", b"1"), part("a[]", b"2", filename="x")), "Duplicate"),
        ((part("", b"1"),), "no name"),
        ((part("a" * 300, b"1"),), "no name"),
        ((part("a", b"\xff\xfe"),), "not UTF-8"),
        ((part("a\u202e\x1b", b"\xff"),), r"^a\\u202e\\x1b is not UTF-8"),
        ((b"--XyZ\r\nContent-Type: text/plain\r\n\r\nx\r\n",), "Content-Disposition"),
        ((b'--XyZ\r\nContent-Disposition: attachment; name="a"\r\n\r\nx\r\n',), "Wrong type"),
        ((b"--XyZ\r\nnonsense\r\n\r\nx\r\n",), "Malformed segment header"),
        ((b"--XyZ\r\nContent-Disposition: \xff\r\n\r\nx\r\n",), "failed to decode"),
        ((b"--XyZ\nContent-Disposition: form-data\n\nx\n",), "line break"),
        ((part("a", b"1", headers="Content-Length: 9\r\n"),), "Content-Length"),
    ],
)
async def test_a_malformed_form_is_refused(parts, message):
    with pytest.raises(InvalidRequest, match=message):
        await read(form(*parts))


@pytest.mark.parametrize("num_bytes", range(0, 90, 7))
async def test_a_truncated_form_is_refused(num_bytes):
    whole = form(part("file", b"sound", filename="a.wav"))
    with pytest.raises(InvalidRequest, match="Unexpected end"):
        await read(whole[:num_bytes])


@pytest.mark.parametrize(
    "whole",
    [
        form(*(part(f"n{n}", b"") for n in range(MAX_FORM_PARTS + 1))),
        form(part("a", b"x" * (MAX_FORM_FIELD_BYTES + 1))),
        form(part("a", b"", headers="X: y\r\n" * 8)),
        form(part("a", b"", headers="X: " + "y" * 5000 + "\r\n")),
        form(part("file", bytes(10**6), filename="a")),
        b"x" * (10**6 + 1),
    ],
    ids=["parts", "field", "headers", "header", "file", "no form"],
)
async def test_every_part_has_a_cap(whole):
    with pytest.raises(PayloadTooLarge):
        await read(*(whole[start : start + 4096] for start in range(0, len(whole), 4096)))


async def test_a_declared_length_over_the_cap_is_refused_unread():
    with pytest.raises(PayloadTooLarge, match="100 bytes"):
        await read(max_bytes=100, content_length="101")


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/mixed; boundary=x", "a/b;c"])
async def test_only_forms_are_read(kind):
    with pytest.raises(UnsupportedMedia):
        await read(form(), content_type=kind)


@pytest.mark.parametrize(
    "boundary", ["", "; boundary=", f"; boundary={'x' * 71}", '; boundary="é"']
)
async def test_a_boundary_is_needed(boundary):
    with pytest.raises(RequestError, match="boundary"):
        await read(form(), content_type="multipart/form-data" + boundary)


async def test_a_compressed_form_is_refused():
    with pytest.raises(UnsupportedMedia, match="Compressed"):
        await read(form(), content_encoding="gzip")


async def test_forms_together_hold_only_so_much():
    whole = form(part("file", bytes(1000), filename="a.wav"))
    budget = UploadBudget(3000)
    held = [await read(whole, budget=budget) for _ in range(2)]
    with pytest.raises(Overloaded) as caught:
        await read(whole[:500], whole[500:], budget=budget)
    assert caught.value.retry_after_s
    del caught
    gc.collect()  # the error held on to what was read
    with pytest.raises(InvalidRequest):
        await read(whole[:500], budget=budget)
    gc.collect()
    assert budget.num_bytes == 2 * len(whole)
    held.pop()
    await read(whole, budget=budget)
    held.clear()
    assert budget.num_bytes == 0


async def test_a_field_that_looks_like_a_file_is_not_one():
    filled = await read(form(part("file", b"sound")))
    with pytest.raises(InvalidRequest, match="audio is required, as a file"):
        filled.file("audio", "file")


@pytest.mark.parametrize("names", [("other",), ("file", "other")])
async def test_only_the_wanted_file_is_taken(names):
    filled = await read(form(*(part(name, b"sound", filename="a") for name in names)))
    with pytest.raises(InvalidRequest, match="Unexpected file field other"):
        filled.file("file")


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")
    temperature: float = 0.0


async def test_fields_are_checked_by_a_model():
    assert Form({"temperature": "0.5"}).parsed(Fields).temperature == 0.5
    with pytest.raises(RequestValidationError) as caught:
        Form({"temprature": "0.5"}).parsed(Fields)
    assert caught.value.errors()[0]["loc"] == ("body", "temprature")


def test_a_form_is_described():
    schema = form_body(Fields, "file")["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert set(schema["properties"]) == {"temperature", "file"}
    assert schema["required"] == ["file"]


async def test_files_of_a_list_are_read_in_order() -> None:
    parts = [part("image[]", bytes([n]), filename="a.png") for n in range(3)]
    whole = await read(form(*parts, part("mask", b"m", filename="m.png"), part("n", b"2")))
    uploads = whole.uploads("image", "image[]", optional=("mask",))
    assert [bytes(upload.data) for upload in uploads] == [b"\x00", b"\x01", b"\x02"]
    assert bytes(whole.files["mask"][0].data) == b"m"
    with pytest.raises(InvalidRequest, match="Unexpected file field mask"):
        whole.uploads("image", "image[]")
    with pytest.raises(InvalidRequest, match="sound is required"):
        whole.uploads("sound", optional=("image[]", "mask"))


async def test_repeated_scalar_field_is_refused() -> None:
    for twice in (
        (part("image", b"1", filename="a"), part("image", b"2", filename="b")),
        (part("image[]", b"1", filename="a"), part("image[]", b"2")),
        (part("image[]", b"1"), part("image[]", b"2", filename="b")),
        (part("n", b"1"), part("n", b"2")),
    ):
        with pytest.raises(InvalidRequest, match="Duplicate"):
            await read(form(*twice))


async def test_upload_keeps_the_declared_content_type() -> None:
    typed = part("a", b"1", filename="a.png", headers="Content-Type: Image/PNG; x=y\r\n")
    whole = await read(form(typed, part("b", b"2", filename="b")))
    assert whole.files["a"][0].media_type == "image/png"
    assert whole.files["b"][0].media_type == ""


async def test_numbers_are_read_out_of_text() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)
        count: int
        is_so: bool

    whole = await read(form(part("count", b"3"), part("is_so", b"true")))
    assert whole.parsed(Strict) == Strict(count=3, is_so=True)

"""Reading and parsing bodies: what is refused, and that it says so."""

from __future__ import annotations

import json
import threading
from typing import Any, Self

import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator
from starlette.requests import Request

from support.http import FakeEngine, in_process, refused
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestTimeout
from triptych.core.http.app import create_app
from triptych.core.http.body import StrictRoute, parse_json, read_body
from triptych.core.limits import MAX_JSON_DEPTH, MAX_JSON_FIELDS
from triptych.core.options.config import Config

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES.filter(lambda value: value not in (float("inf"), float("-inf"))))
def test_json_is_read_as_the_library_reads_it(value: Any) -> None:
    try:
        raw = json.dumps(value, allow_nan=False).encode()
    except ValueError:  # an infinity deep inside
        return
    assert parse_json(raw) == value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1,]", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "Duplicate field 'c'"),
        (b'{"t": NaN}', "NaN"),
        (b'{"t": -Infinity}', "-Infinity"),
        (b'{"t": "\\ud800"}', "surrogate"),
        (b'{"\\uDFFF": 1}', "surrogate"),
        (b'{"t": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"t": "\xff"}', "UTF-8"),
        (b'{"t": ' + b"1" * 5000 + b"}", "too long"),
        (b"[" * 10**5, "nested"),
        (b"[" * 10**5 + b"]" * 10**5, "nested"),
        (b'{"a":' * 10**5 + b"1" + b"}" * 10**5, "nested"),
        (b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1), "nested"),
    ],
)
def test_invalid_json_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_json(raw)


def test_depth_counts_structure_not_text() -> None:
    deep = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    assert parse_json(deep) is not None
    text = "[{" * 1000 + '\\"' + "]"
    assert parse_json(json.dumps([text, "\\"]).encode()) == [text, "\\"]


def test_an_unclosed_string_of_escapes_takes_linear_time() -> None:
    with pytest.raises(InvalidRequest):  # quadratic scanning would hit the suite's time limit
        parse_json(b'["' + b'\\"' * 2_000_000)


def test_objects_have_a_bounded_number_of_fields() -> None:
    fields = {str(n): n for n in range(MAX_JSON_FIELDS + 1)}
    with pytest.raises(InvalidRequest, match="fields"):
        parse_json(json.dumps(fields).encode())


def test_bodies_have_a_bounded_number_of_containers() -> None:
    with pytest.raises(InvalidRequest, match="objects and arrays"):
        parse_json(b"[" + b"[]," * 1_300_000 + b"[]]")


def test_surrogate_pairs_and_nul_are_ordinary_text() -> None:
    assert parse_json(b'"\\ud83d\\ude00\\u0000"') == "\U0001f600\0"


def request(*chunks: bytes, length: str | None = None, is_stuck: bool = False) -> Request:
    """A request whose body arrives as `chunks`."""
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages += [] if is_stuck else [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            import asyncio

            await asyncio.Event().wait()
        return messages.pop(0)

    headers = [] if length is None else [(b"content-length", length.encode())]
    return Request({"type": "http", "headers": headers}, receive)


async def test_chunks_are_put_together() -> None:
    assert await read_body(request(b"ab", b"", b"c"), 3) == b"abc"


@pytest.mark.parametrize("length", ["101", "99999999999999999999999", "-1", "1e3", ""])
async def test_a_declared_length_over_the_cap_is_refused_unread(length: str) -> None:
    with pytest.raises(PayloadTooLarge, match="100 bytes"):
        await read_body(request(is_stuck=True, length=length), 100)


@pytest.mark.parametrize("length", [None, "3"])
async def test_received_bytes_count_whatever_was_declared(length: str | None) -> None:
    with pytest.raises(PayloadTooLarge):
        await read_body(request(b"x" * 60, b"x" * 60, length=length), 100)


async def test_a_body_that_stops_arriving_is_given_up() -> None:
    with pytest.raises(RequestTimeout, match="send it faster"):
        await read_body(request(b"{", is_stuck=True), 100, timeout_s=0.05)


def test_depth_is_counted_over_more_strings_than_are_looked_at_together() -> None:
    many = b'{"t": ["[", ' + b'"x", ' * 10_000
    depth = MAX_JSON_DEPTH - 2
    parse_json(many + b"[" * depth + b"]" * depth + b"]}")
    for rest in (b"[" * (depth + 2) + b"]" * (depth + 2) + b"]}", b"[" * 9, b'"]}'):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            parse_json(many + rest)


class _Seen(BaseModel):
    """Knows which thread looked at it."""

    text: str
    number: int
    threads: list[str] = []

    @model_validator(mode="after")
    def _look(self) -> Self:
        self.threads.append(threading.current_thread().name)
        return self


@pytest.mark.parametrize("is_large", [False, True])
async def test_large_bodies_are_read_off_the_event_loop(is_large: bool) -> None:
    router = APIRouter(route_class=StrictRoute)

    @router.post("/seen")
    async def seen(body: _Seen) -> list[str]:
        return body.threads

    async with in_process(create_app(Config(), FakeEngine(), [router])) as client:
        text = "x" * (2**14 if is_large else 10)
        first, *_ = (await client.post("/seen", json={"text": text, "number": 1})).json()
        assert first.startswith("triptych-") is is_large
        error = refused(await client.post("/seen", json={"text": text, "number": "one"}))
        assert error["param"] == "number"
        error = refused(await client.post("/seen", json=[text]))
        assert error["code"] == "invalid_request"

"""`/v1/files`, asked by the `openai` package and by strangers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.http import FakeEngine, in_process, live, refused
from support.stored_app import make_stored_app, running
from triptych.core.http.files.user_files import FileAbout, UserFiles
from triptych.core.store.documents import Page
from triptych.core.store.store import DocumentStore

PIECES = bytes(range(256)) * 3000
"""Longer than a piece of the store."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    made = make_stored_app(tmp_path_factory.mktemp("files"), FakeEngine(), api_key=("ann", "bob"))
    assert made.store is not None
    with live(made.app) as server, httpx.Client(verify=False) as http:
        yield openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="ann", max_retries=0, http_client=http
        )
    asyncio.run(made.store.close())


def test_a_file_comes_back_as_it_was_sent(client: openai.OpenAI) -> None:
    before_s = int(time.time())
    made = client.files.create(file=("notes.bin", PIECES), purpose="user_data")
    assert made.object == "file"
    assert made.bytes == len(PIECES)
    assert made.filename == "notes.bin"
    assert made.purpose == "user_data"
    assert made.status == "processed"
    assert made.expires_at is None
    assert before_s <= made.created_at <= time.time()
    assert client.files.retrieve(made.id) == made
    content = client.files.content(made.id)
    assert content.read() == PIECES
    assert content.response.headers["content-disposition"] == "attachment"
    gone = client.files.delete(made.id)
    assert gone.deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(made.id)


def test_the_package_pages_through_a_list(client: openai.OpenAI) -> None:
    made = [
        client.files.create(file=(f"{n}", b"x"), purpose="evals" if n % 2 else "vision").id
        for n in range(7)
    ]
    seen = [file.id for file in client.files.list(limit=2, order="asc") if file.id in made]
    assert seen == made
    newest = client.files.list(limit=3, purpose="evals")
    assert [file.id for file in newest.data] == [made[5], made[3], made[1]]
    assert not newest.has_more
    for file_id in made:
        client.files.delete(file_id)


def test_an_empty_file_is_a_file(client: openai.OpenAI) -> None:
    made = client.files.create(file=("empty", b""), purpose="batch")
    assert client.files.content(made.id).read() == b""


def test_a_lifetime_is_kept(client: openai.OpenAI) -> None:
    made = client.files.create(
        file=("a", b"x"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert made.expires_at is not None
    assert abs(made.expires_at - made.created_at - 3600) <= 1


def test_nobody_finds_anothers_file(client: openai.OpenAI) -> None:
    made = client.files.create(file=("secret", b"x"), purpose="batch")
    bob = client.with_options(api_key="bob")
    for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    assert made.id not in [file.id for file in bob.files.list()]
    with pytest.raises(openai.BadRequestError):
        bob.files.list(after=made.id).data  # noqa: B018 - it is fetched when it is asked for


@pytest.fixture
async def stranger(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    made = make_stored_app(tmp_path, FakeEngine(), max_bytes=2**16, max_upload_bytes=2**18)
    async with running(made), in_process(made.app) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at"}
            | {"expires_after[seconds]": "1"},
            "expires_after[seconds]",
        ),
        ({"purpose": "batch", "owner": "x"}, "owner"),
    ],
)
async def test_what_is_wrong_with_a_form_is_named(
    stranger: httpx.AsyncClient, fields: dict[str, str], param: str
) -> None:
    reply = await stranger.post("/v1/files", data=fields, files={"file": ("a", b"x")})
    assert refused(reply)["param"] == param


async def test_what_does_not_fit_is_refused_and_leaves_nothing(
    stranger: httpx.AsyncClient,
) -> None:
    for size, code in ((2**17, "store_full"), (2**19, "payload_too_large")):
        reply = await stranger.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * size)}
        )
        assert refused(reply, 413)["code"] == code
    assert (await stranger.get("/v1/files")).json()["data"] == []


async def test_names_of_files_are_data(stranger: httpx.AsyncClient) -> None:
    for name, kept in (("../../etc/passwd", "passwd"), ("a\\b", "b"), ("..", "..")):
        reply = await stranger.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": (name, b"x")}
        )
        assert reply.json()["filename"] == kept


async def test_without_a_store_the_routes_say_so(tmp_path: Path) -> None:
    made = make_stored_app(tmp_path, FakeEngine(), place="off")
    async with running(made), in_process(made.app) as client:
        upload = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x")}}
        for reply in (
            await client.get("/v1/files"),
            await client.post("/v1/files", **upload),
            await client.get("/v1/files/file-1/content"),
            await client.get("/v1/batches"),
        ):
            assert refused(reply)["code"] == "unsupported_option"


@settings(max_examples=40, deadline=None)
@given(
    purposes=st.lists(st.sampled_from(["batch", "vision"]), max_size=12),
    limit=st.integers(1, 5),
    is_descending=st.booleans(),
    purpose=st.sampled_from([None, "batch", "vision"]),
)
def test_pages_hold_every_file_once(
    purposes: list[str], limit: int, is_descending: bool, purpose: str | None
) -> None:
    async def pages() -> tuple[list[str], list[str]]:
        store = DocumentStore("memory", max_bytes=2**20, ttl_s=60.0)
        user_files = UserFiles(store)
        made = [await user_files.add("", FileAbout("f", each)) for each in purposes]  # type: ignore[arg-type]
        await user_files.add("", FileAbout("g", "batch"), is_growing=True)
        wanted = [file.id for file in made if purpose in (None, file.about.purpose)]
        seen: list[str] = []
        while True:
            after = seen[-1] if seen else ""
            page = Page(limit=limit, after=after, is_descending=is_descending)
            found = await user_files.listed("", page, purpose)  # type: ignore[arg-type]
            if not found:
                break
            seen += [file.id for file in found]
        await store.close()
        return seen, wanted[::-1] if is_descending else wanted

    seen, wanted = asyncio.run(pages())
    assert seen == wanted

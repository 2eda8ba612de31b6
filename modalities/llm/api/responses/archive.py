"""Stores answers and conversations by owner.

Owns writing and reading them. An answer stores its own input only; `history` finds earlier items
through the previous answer. Knows nothing of HTTP and of how an answer is generated.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from triptych.core.errors import InternalError
from triptych.core.http.json_writer import write_json
from triptych.core.media.fetch import Fetched
from triptych.core.store.documents import Document, DocumentTable, Key, Page
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.responses.history import HistoryReader
from triptych.modalities.llm.api.responses.items import KEPT_PLACE, KeptItem, new_id, shown_parts
from triptych.modalities.llm.api.responses.layout import (
    CONVERSATION,
    IMAGE,
    INPUT,
    ITEM,
    OUTPUT,
    RESPONSE,
    load,
    not_found,
    walk,
    within,
)
from triptych.modalities.llm.api.responses.replies import (
    WHOLE,
    ResponseFailure,
    ResponseReply,
)

ReplyFields = dict[str, Any]
"""An item as it is returned; the `image_url` of a stored image is its place in the store."""

_RUNNING = "running"
MAX_PAGE_BYTES: Final = 2**23
"""Of a page, which ends before an item that exceeds it, but has at least one item."""
_PREFIX_CHARS = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """The stored part of a request: its items, and their images by URL."""

    items: Sequence[KeptItem]
    images: Mapping[str, Fetched]

    def shown(self) -> list[ReplyFields]:
        """The items as they are returned, each with an id."""
        return [item.shown() for item in self.items]


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page of a list, and whether there are more items after it."""

    items: list[ReplyFields]
    has_more: bool


class Archive:
    """The answers and conversations in `store`. A history has at most `max_bytes`."""

    def __init__(self, store: DocumentStore, *, max_bytes: int) -> None:
        self._store = store
        self.history = HistoryReader(store, max_bytes=max_bytes)
        store.run(_end_abandoned)

    async def image(self, owner: str, url: str) -> Fetched | None:
        """The image at a place in the store; `None` if there is none."""
        image_id, _, media_type = url.removeprefix(KEPT_PLACE).partition(";")
        if not url.startswith(KEPT_PLACE):
            return None
        data = bytearray()
        async for piece in self._store.content(Key(IMAGE, image_id, owner)):
            data += piece
        return Fetched(data, media_type) if data else None

    async def begin(self, owner: str, response: ResponseReply, request: KeptRequest) -> None:
        """Store an answer that has not begun."""
        await self._store.call(_add_response, owner, response, request, _RUNNING)

    async def complete(
        self, owner: str, response: ResponseReply, request: KeptRequest, events: bytes = b""
    ) -> None:
        """Store an answer if it is to be stored, and add it to its conversation.

        A background answer is updated, with its `events`, unless it was deleted.
        """

        def change(table: DocumentTable) -> None:
            if not response.background:
                if response.store:
                    _add_response(table, owner, response, request, "")
            elif table.replace(key := Key(RESPONSE, response.id, owner), _body(response)):
                table.append(key, events)
                table.add(*_outputs(owner, response))
            if response.conversation is not None and response.status in WHOLE:
                _continue(table, owner, response, request)

        await self._store.call(change)

    async def extend(
        self, owner: str, conversation_id: str, request: KeptRequest
    ) -> list[ReplyFields]:
        """Add items to a conversation; return them as stored. Raises `NotFound`."""
        return await self._store.call(_extend, Key(CONVERSATION, conversation_id, owner), request)

    async def response(self, owner: str, response_id: str) -> ReplyFields:
        """An answer. Raises `NotFound`."""

        def read(table: DocumentTable) -> ReplyFields:
            key = Key(RESPONSE, response_id, owner)
            shown = _load(table, key)
            shown["output"] = [msgspec.json.decode(item.body) for item in walk(table, key, OUTPUT)]
            return shown

        return await self._store.call(read)

    async def events(self, owner: str, response_id: str) -> AsyncGenerator[bytes, None]:
        """The events of an answer, each as JSON; empty if they are not stored."""
        rest = b""
        async with aclosing(self._store.content(Key(RESPONSE, response_id, owner))) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line

    async def inputs(self, owner: str, response_id: str, page: Page) -> FoundPage:
        """A page of the input items of an answer. Raises `NotFound`."""
        return await self._store.call(_page, Key(RESPONSE, response_id, owner), INPUT, page)

    async def items(self, owner: str, conversation_id: str, page: Page) -> FoundPage:
        """A page of a conversation. Raises `NotFound`."""
        return await self._store.call(_page, Key(CONVERSATION, conversation_id, owner), ITEM, page)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> ReplyFields:
        """An item of a conversation. Raises `NotFound`."""
        name = within(conversation_id, item_id)
        return await self._store.call(lambda table: _load(table, Key(ITEM, name, owner)))

    async def add_conversation(self, owner: str, shown: ReplyFields, request: KeptRequest) -> None:
        """Store a new conversation."""

        def add(table: DocumentTable) -> None:
            key = Key(CONVERSATION, shown["id"], owner)
            table.add(Document(key=key, body=_json(shown)))
            _extend(table, key, request)

        await self._store.call(add)

    async def conversation(self, owner: str, conversation_id: str) -> ReplyFields:
        """A conversation without its items. Raises `NotFound`."""
        key = Key(CONVERSATION, conversation_id, owner)
        return await self._store.call(lambda table: _load(table, key))

    async def relabel(
        self, owner: str, conversation_id: str, metadata: dict[str, str]
    ) -> ReplyFields:
        """Change a conversation's metadata. Raises `NotFound`."""

        def change(table: DocumentTable) -> ReplyFields:
            key = Key(CONVERSATION, conversation_id, owner)
            shown = {**_load(table, key), "metadata": metadata}
            table.replace(key, _json(shown))
            return shown

        return await self._store.call(change)

    async def delete(self, owner: str, kind: str, name: str) -> None:
        """Delete an answer or a conversation with all its items. Raises `NotFound`."""
        await self._store.call(_delete, Key(kind, name, owner))

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> ReplyFields:
        """Delete an item; return its conversation. Raises `NotFound`."""

        def change(table: DocumentTable) -> ReplyFields:
            shown = _load(table, Key(CONVERSATION, conversation_id, owner))
            _delete(table, Key(ITEM, within(conversation_id, item_id), owner))
            return shown

        return await self._store.call(change)


def _json(shown: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(shown)


def _body(response: ResponseReply) -> bytes:
    return response.model_dump_json(exclude_unset=True, exclude={"output"}).encode()


def _load(table: DocumentTable, key: Key) -> ReplyFields:
    shown: ReplyFields = msgspec.json.decode(load(table, key).body)
    return shown


def _delete(table: DocumentTable, key: Key) -> None:
    if not table.delete(key):
        raise not_found(key)


def _add_response(
    table: DocumentTable, owner: str, response: ResponseReply, request: KeptRequest, status: str
) -> None:
    key = Key(RESPONSE, response.id, owner)
    table.add(Document(key=key, body=_body(response), status=status))
    _add_items(table, key, INPUT, request.shown(), request.images)
    table.add(*_outputs(owner, response))


def _outputs(owner: str, response: ResponseReply) -> list[Document]:
    parent = Key(RESPONSE, response.id, owner)
    return [
        Document(
            key=Key(OUTPUT, item.id, owner),
            body=write_json(item),
            parent=parent,
        )
        for item in response.output
    ]


def _continue(
    table: DocumentTable, owner: str, response: ResponseReply, request: KeptRequest
) -> None:
    """Add input and answer to a conversation, unless it was deleted meanwhile."""
    assert response.conversation is not None
    key = Key(CONVERSATION, response.conversation.id, owner)
    made = [msgspec.json.decode(write_json(item)) for item in response.output]
    if table.get(key) is not None:
        _add_items(table, key, ITEM, [*request.shown(), *made], request.images)


def _extend(table: DocumentTable, key: Key, request: KeptRequest) -> list[ReplyFields]:
    load(table, key)
    return _add_items(table, key, ITEM, request.shown(), request.images)


def _add_items(
    table: DocumentTable,
    parent: Key,
    kind: str,
    items: Iterable[ReplyFields],
    images: Mapping[str, Fetched],
) -> list[ReplyFields]:
    """Add items with their images as children."""
    added = []
    for shown in items:
        item, places = _with_images(shown, images)
        key = Key(kind, within(parent.id, item["id"]), parent.owner)
        if table.get(key) is not None:  # its client sent it before
            item = {**item, "id": new_id(item["id"].partition("_")[0][:_PREFIX_CHARS])}
            key = Key(kind, within(parent.id, item["id"]), parent.owner)
        table.add(Document(key=key, body=_json(item), parent=parent))
        for image_id, image in places.items():
            place = Key(IMAGE, image_id, parent.owner)
            table.add(Document(key=place, body=b"", parent=key))
            table.append(place, image.data)
        added.append(item)
    return added


def _with_images(
    item: ReplyFields, images: Mapping[str, Fetched]
) -> tuple[ReplyFields, dict[str, Fetched]]:
    """The item with places in the store as image URLs, and the images by id."""
    places: dict[str, Fetched] = {}
    field, parts = shown_parts(item)
    if not images or not parts:
        return item, places

    def place_image(part: ReplyFields) -> ReplyFields:
        found = images.get(part.get("image_url", ""))
        if found is None:
            return part
        image_id = new_id("pic")
        places[image_id] = found
        return {**part, "image_url": f"{KEPT_PLACE}{image_id};{found.media_type}"}

    return {**item, field: [place_image(part) for part in parts]}, places


def _page(table: DocumentTable, parent: Key, kind: str, page: Page) -> FoundPage:
    load(table, parent)
    after = within(parent.id, page.after) if page.after else ""
    items: list[ReplyFields] = []
    num_bytes = 0
    for document in walk(table, parent, kind, replace(page, after=after)):
        num_bytes += len(document.body)
        if len(items) == page.limit or (items and num_bytes > MAX_PAGE_BYTES):
            return FoundPage(items, has_more=True)
        items.append(msgspec.json.decode(document.body))
    return FoundPage(items, has_more=False)


def _end_abandoned(table: DocumentTable) -> None:
    """Mark answers as failed that were in progress when the server stopped unexpectedly."""
    error = InternalError("The server stopped before this response was complete.")
    failed = {"status": "failed", "error": ResponseFailure.of(error).model_dump()}
    abandoned = table.with_status(RESPONSE, _RUNNING)
    for document in abandoned:
        table.replace(document.key, _json({**msgspec.json.decode(document.body), **failed}))
    if abandoned:
        _log.warning("%d responses were not complete when the server stopped", len(abandoned))

"""Where answers and conversations are kept, for whoever made them.

Owns how they lie in the store: an answer or a conversation is a document, its items and pictures
are its children. Each answer keeps its own input alone; what went before is found through the
answer before. Knows nothing of HTTP, and not how an answer is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from triptych.core.errors import InternalError, InvalidRequest, NotFound, PayloadTooLarge
from triptych.core.limits import MAX_MESSAGES
from triptych.core.media.fetch import Fetched
from triptych.core.store.documents import Document, DocumentTable, Key, Page
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.responses.items import KeptItem, new_id
from triptych.modalities.llm.api.responses.replies import (
    UNFINISHED,
    WHOLE,
    ResponseFailure,
    ResponseReply,
)

Shown = dict[str, Any]
"""An item as it is returned; of a picture that is kept, `image_url` is its place here."""

RESPONSE: Final = "response"
CONVERSATION: Final = "conversation"
_INPUT, _OUTPUT, _ITEM, _PICTURE = (
    "response_input",
    "response_output",
    "conversation_item",
    "picture",
)
_RUNNING = "running"
_PLACE: Final = "kept-picture:"
_AT_ONCE = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Belongings:
    """What is kept of a request: its items, and the pictures in them by URL."""

    items: Sequence[KeptItem]
    pictures: Mapping[str, Fetched]

    def shown(self) -> list[Shown]:
        """The items as they are returned, those without an id under a new one."""
        return [item.shown() for item in self.items]


@dataclass(frozen=True, slots=True)
class Sought:
    """A page of a list, and whether there is more behind it."""

    items: list[Shown]
    has_more: bool


class Archive:
    """What `owner`s have in `store`. What goes before an answer has at most `max_bytes`."""

    def __init__(self, store: DocumentStore, *, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        store.run(_end_abandoned)

    async def before(self, owner: str, response_id: str) -> list[bytes]:
        """All items up to that answer's end, as JSON. Raises `NotFound`, `InvalidRequest`."""
        return await self._store.call(self._chain, Key(RESPONSE, response_id, owner))

    async def said_in(self, owner: str, conversation_id: str) -> list[bytes]:
        """All items of a conversation, as JSON. Raises `NotFound`."""

        def read(table: DocumentTable) -> list[bytes]:
            key = _there(table, Key(CONVERSATION, conversation_id, owner))
            table.renew(key)
            return _bounded(_children(table, key, _ITEM), self._max_bytes)

        return await self._store.call(read)

    async def referred(self, owner: str, item_id: str, conversation_id: str | None) -> bytes:
        """An item of an answer, or of a conversation, as JSON. Raises `NotFound`."""

        def read(table: DocumentTable) -> bytes:
            inside = Key(_ITEM, _within(conversation_id or "", item_id), owner)
            document = table.get(Key(_OUTPUT, item_id, owner)) or table.get(inside)
            if document is None:
                raise NotFound(f"There is no item {item_id[:80]!a} here.", param="input")
            return document.body

        return await self._store.call(read)

    async def picture(self, owner: str, url: str) -> Fetched | None:
        """The picture at a place of ours; `None` where there is none."""
        picture_id, _, media_type = url.removeprefix(_PLACE).partition(";")
        if not url.startswith(_PLACE):
            return None
        data = bytearray()
        async for piece in self._store.content(Key(_PICTURE, picture_id, owner)):
            data += piece
        return Fetched(data, media_type) if data else None

    async def begin(self, owner: str, response: ResponseReply, given: Belongings) -> None:
        """Keep an answer that is yet to be made."""
        await self._store.call(_add_response, owner, response, given, _RUNNING)

    async def complete(
        self, owner: str, response: ResponseReply, given: Belongings, events: bytes = b""
    ) -> None:
        """Keep an answer if it says so, and add it to its conversation.

        One that was begun is changed, with its `events` beside it, unless it was deleted.
        """

        def change(table: DocumentTable) -> None:
            if not response.background:
                if response.store:
                    _add_response(table, owner, response, given, "")
            elif table.replace(key := Key(RESPONSE, response.id, owner), _body(response)):
                table.append(key, events)
                table.add(*_outputs(owner, response))
            if response.conversation is not None and response.status in WHOLE:
                _continue(table, owner, response, given)

        await self._store.call(change)

    async def extend(self, owner: str, conversation_id: str, given: Belongings) -> list[Shown]:
        """Add items to a conversation; as they are kept. Raises `NotFound`."""
        return await self._store.call(_extend, Key(CONVERSATION, conversation_id, owner), given)

    async def response(self, owner: str, response_id: str) -> Shown:
        """An answer. Raises `NotFound`."""

        def read(table: DocumentTable) -> Shown:
            key = _there(table, Key(RESPONSE, response_id, owner))
            shown = _load(table, key)
            shown["output"] = [msgspec.json.decode(body) for body in _children(table, key, _OUTPUT)]
            return shown

        return await self._store.call(read)

    async def events(self, owner: str, response_id: str) -> bytes:
        """The events of an answer, a line each, as JSON; empty where they are not kept."""
        key = Key(RESPONSE, response_id, owner)
        return b"".join([piece async for piece in self._store.content(key)])

    async def inputs(self, owner: str, response_id: str, page: Page) -> Sought:
        """A page of the items that an answer was made of. Raises `NotFound`."""
        return await self._store.call(_page, Key(RESPONSE, response_id, owner), _INPUT, page)

    async def items(self, owner: str, conversation_id: str, page: Page) -> Sought:
        """A page of a conversation. Raises `NotFound`."""
        return await self._store.call(_page, Key(CONVERSATION, conversation_id, owner), _ITEM, page)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> Shown:
        """An item of a conversation. Raises `NotFound`."""
        name = _within(conversation_id, item_id)
        return await self._store.call(lambda table: _load(table, Key(_ITEM, name, owner)))

    async def add_conversation(self, owner: str, shown: Shown, given: Belongings) -> None:
        """Begin a conversation."""

        def add(table: DocumentTable) -> None:
            key = Key(CONVERSATION, shown["id"], owner)
            table.add(Document(key=key, body=_json(shown)))
            _extend(table, key, given)

        await self._store.call(add)

    async def conversation(self, owner: str, conversation_id: str) -> Shown:
        """A conversation without its items. Raises `NotFound`."""
        key = Key(CONVERSATION, conversation_id, owner)
        return await self._store.call(lambda table: _load(table, key))

    async def relabel(self, owner: str, conversation_id: str, metadata: dict[str, str]) -> Shown:
        """Change a conversation's metadata. Raises `NotFound`."""

        def change(table: DocumentTable) -> Shown:
            key = Key(CONVERSATION, conversation_id, owner)
            shown = {**_load(table, key), "metadata": metadata}
            table.replace(key, _json(shown))
            return shown

        return await self._store.call(change)

    async def delete(self, owner: str, kind: str, name: str) -> None:
        """Forget an answer or a conversation with all its items. Raises `NotFound`."""
        await self._store.call(_delete, Key(kind, name, owner))

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> Shown:
        """Forget an item; its conversation is returned. Raises `NotFound`."""

        def change(table: DocumentTable) -> Shown:
            shown = _load(table, Key(CONVERSATION, conversation_id, owner))
            _delete(table, Key(_ITEM, _within(conversation_id, item_id), owner))
            return shown

        return await self._store.call(change)

    def _chain(self, table: DocumentTable, last: Key) -> list[bytes]:
        links = list(_links(table, last))
        table.renew(*links)
        bodies = (
            body
            for key in reversed(links)
            for kind in (_INPUT, _OUTPUT)
            for body in _children(table, key, kind)
        )
        return _bounded(bodies, self._max_bytes)


def is_kept_picture(url: str) -> bool:
    """Whether a URL is a place of ours."""
    return url.startswith(_PLACE)


def _within(parent_id: str, item_id: str) -> str:
    """The name of an item whose id its client chose."""
    return f"{parent_id}.{item_id}"


def _json(shown: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(shown)


def _body(response: ResponseReply) -> bytes:
    return response.model_dump_json(exclude_unset=True, exclude={"output"}).encode()


def _there(table: DocumentTable, key: Key) -> Key:
    if table.get(key) is None:
        raise _missing(key)
    return key


def _load(table: DocumentTable, key: Key) -> Shown:
    document = table.get(key)
    if document is None:
        raise _missing(key)
    shown: Shown = msgspec.json.decode(document.body)
    return shown


def _delete(table: DocumentTable, key: Key) -> None:
    if not table.delete(key):
        raise _missing(key)


def _missing(key: Key) -> NotFound:
    what = key.kind.partition("_")[2] or key.kind
    name = key.id.rpartition(".")[2][:80]
    return NotFound(f"You have no {what} {name!a} here, or it was kept long enough.")


def _links(table: DocumentTable, key: Key) -> Iterator[Key]:
    """An answer and those before it, the last first."""
    for _ in range(MAX_MESSAGES):
        shown = _load(table, key)
        if shown["status"] in UNFINISHED:
            raise InvalidRequest(
                f"The response {key.id[:80]!a} is still being made: wait for its end.",
                param="previous_response_id",
            )
        if shown["conversation"]:
            raise InvalidRequest(
                f"The response {key.id[:80]!a} is part of a conversation: go on with conversation"
                f" {shown['conversation']['id']!a}.",
                param="previous_response_id",
            )
        yield key
        if shown["previous_response_id"] is None:
            return
        key = Key(RESPONSE, shown["previous_response_id"], key.owner)
    raise PayloadTooLarge(
        f"Over {MAX_MESSAGES} responses go before this one.", param="previous_response_id"
    )


def _children(table: DocumentTable, parent: Key, kind: str) -> Iterator[bytes]:
    after = ""
    while documents := table.listed(parent.owner, kind, Page(limit=_AT_ONCE, after=after), parent):
        yield from (document.body for document in documents)
        after = documents[-1].key.id


def _bounded(bodies: Iterable[bytes], max_bytes: int) -> list[bytes]:
    found, num_bytes = [], 0
    for body in bodies:
        num_bytes += len(body)
        found.append(body)
        if num_bytes > max_bytes or len(found) > MAX_MESSAGES:
            raise PayloadTooLarge(
                f"What goes before is over {max_bytes} bytes or {MAX_MESSAGES} items: begin anew."
            )
    return found


def _add_response(
    table: DocumentTable, owner: str, response: ResponseReply, given: Belongings, status: str
) -> None:
    key = Key(RESPONSE, response.id, owner)
    table.add(Document(key=key, body=_body(response), status=status))
    _add_items(table, key, _INPUT, given.shown(), given.pictures)
    table.add(*_outputs(owner, response))


def _outputs(owner: str, response: ResponseReply) -> list[Document]:
    parent = Key(RESPONSE, response.id, owner)
    return [
        Document(
            key=Key(_OUTPUT, item.id, owner),
            body=item.model_dump_json(exclude_unset=True).encode(),
            parent=parent,
        )
        for item in response.output
    ]


def _continue(table: DocumentTable, owner: str, response: ResponseReply, given: Belongings) -> None:
    """Add input and answer to a conversation that may have been deleted meanwhile."""
    assert response.conversation is not None
    key = Key(CONVERSATION, response.conversation.id, owner)
    made = [item.model_dump(exclude_unset=True) for item in response.output]
    if table.get(key) is not None:
        _add_items(table, key, _ITEM, [*given.shown(), *made], given.pictures)


def _extend(table: DocumentTable, key: Key, given: Belongings) -> list[Shown]:
    return _add_items(table, _there(table, key), _ITEM, given.shown(), given.pictures)


def _add_items(
    table: DocumentTable,
    parent: Key,
    kind: str,
    items: Iterable[Shown],
    pictures: Mapping[str, Fetched],
) -> list[Shown]:
    added = []
    for shown in items:
        item = _with_pictures(table, parent, shown, pictures)
        key = Key(kind, _within(parent.id, item["id"]), parent.owner)
        if table.get(key) is not None:  # its client sent it before
            item = {**item, "id": new_id(item["id"].partition("_")[0])}
            key = Key(kind, _within(parent.id, item["id"]), parent.owner)
        table.add(Document(key=key, body=_json(item), parent=parent))
        added.append(item)
    return added


def _with_pictures(
    table: DocumentTable, parent: Key, item: Shown, pictures: Mapping[str, Fetched]
) -> Shown:
    """The item with its pictures kept beside it."""
    content = item.get("content")
    if not pictures or not isinstance(content, list):
        return item
    return {**item, "content": [_with_picture(table, parent, part, pictures) for part in content]}


def _with_picture(
    table: DocumentTable, parent: Key, part: Shown, pictures: Mapping[str, Fetched]
) -> Shown:
    found = pictures.get(part.get("image_url", ""))
    if found is None:
        return part
    key = Key(_PICTURE, new_id("pic"), parent.owner)
    table.add(Document(key=key, body=b"", parent=parent))
    table.append(key, found.data)
    return {**part, "image_url": f"{_PLACE}{key.id};{found.media_type}"}


def _page(table: DocumentTable, parent: Key, kind: str, page: Page) -> Sought:
    _there(table, parent)
    after = _within(parent.id, page.after) if page.after else ""
    wanted = Page(limit=page.limit + 1, after=after, is_descending=page.is_descending)
    found = table.listed(parent.owner, kind, wanted, parent)
    items = [msgspec.json.decode(document.body) for document in found[: page.limit]]
    return Sought(items, has_more=len(found) > page.limit)


def _end_abandoned(table: DocumentTable) -> None:
    """End answers that were being made when the server stopped without a word."""
    error = InternalError("The server stopped before this response was complete.")
    failed = {"status": "failed", "error": ResponseFailure.of(error).model_dump()}
    abandoned = table.with_status(RESPONSE, _RUNNING)
    for document in abandoned:
        table.replace(document.key, _json({**msgspec.json.decode(document.body), **failed}))
    if abandoned:
        _log.warning("%d responses were not complete when the server stopped", len(abandoned))

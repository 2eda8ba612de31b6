"""Where answers and conversations are kept, for whoever made them.

Owns how they lie in the store: an answer or a conversation is a document, its items and pictures
are its children. Each answer keeps its own input alone; what went before is found through the
answer before. Knows nothing of HTTP, and not how an answer is made.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from triptych.core.errors import InternalError, InvalidRequest, NotFound, PayloadTooLarge
from triptych.core.limits import MAX_MESSAGES
from triptych.core.media.fetch import Fetched
from triptych.core.store.documents import Document, DocumentTable, Key, Page
from triptych.core.store.store import DocumentStore
from triptych.core.typed import decode_json
from triptych.modalities.llm.api.responses.items import KEPT_PLACE, KeptItem, new_id
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
MAX_PAGE_BYTES: Final = 2**23
"""Of a list: what is behind that is for the next page, but for the first item."""
_AT_ONCE = 16
_BATCH, _BATCH_BYTES = 64, 2**20
"""What one transaction reads of what may be long."""
_PREFIX_CHARS = 16
Entry = TypeVar("Entry")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class History:
    """What goes before an answer, and what items its input refers to, each as JSON."""

    before: list[bytes]
    referred: list[bytes]

    @property
    def num_bytes(self) -> int:
        """The length of it all."""
        return sum(map(len, self.before)) + sum(map(len, self.referred))


class _Link(msgspec.Struct):
    """What of an answer matters for those that go on from it."""

    status: str
    conversation: dict[str, str] | None = None
    previous_response_id: str | None = None


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

    async def history(
        self,
        owner: str,
        response_id: str | None,
        conversation_id: str | None,
        item_ids: Sequence[str],
    ) -> History:
        """All up to the end of that answer or conversation, and the items of those ids.

        Raises `NotFound`, `InvalidRequest`, and `PayloadTooLarge` for more than may be sent.
        """
        allowance, before, referred = _Allowance(self._max_bytes), [], []
        if response_id is not None:
            before = await self._chain(Key(RESPONSE, response_id, owner), allowance)
        elif conversation_id is not None:
            key = Key(CONVERSATION, conversation_id, owner)
            before = await self._store.call(_conversation, key, allowance)
        for some in _batches(item_ids):
            find = partial(_referred, owner=owner, conversation_id=conversation_id or "")
            referred += await self._store.call(find, some, allowance)
        return History(before, referred)

    async def picture(self, owner: str, url: str) -> Fetched | None:
        """The picture at a place of ours; `None` where there is none."""
        picture_id, _, media_type = url.removeprefix(KEPT_PLACE).partition(";")
        if not url.startswith(KEPT_PLACE):
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
            shown["output"] = [
                msgspec.json.decode(item.body) for item in _walk(table, key, _OUTPUT)
            ]
            return shown

        return await self._store.call(read)

    async def events(self, owner: str, response_id: str) -> AsyncGenerator[bytes, None]:
        """The events of an answer, each as JSON; none where they are not kept."""
        rest = b""
        async with aclosing(self._store.content(Key(RESPONSE, response_id, owner))) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line

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

    async def _chain(self, last: Key, allowance: _Allowance) -> list[bytes]:
        """Some links at a time, so that others come to use the store, too."""
        links: list[Key] = []
        key: Key | None = last
        while key is not None:
            some, key = await self._store.call(_links, key, MAX_MESSAGES - len(links))
            links += some
        bodies = []
        for keys in _batches(links[::-1]):
            bodies += await self._store.call(_linked, keys, allowance)
        return bodies


class _Allowance:
    """How much may go before an answer, in bytes and items."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = self._num_items = 0

    def take(self, body: bytes) -> bytes:
        """One more item. Raises `PayloadTooLarge`."""
        self._num_bytes += len(body)
        self._num_items += 1
        if self._num_bytes > self._max_bytes or self._num_items > MAX_MESSAGES:
            raise PayloadTooLarge(
                f"What goes before is over {self._max_bytes} bytes or {MAX_MESSAGES} items: begin"
                " anew."
            )
        return body


def _batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    return (entries[start : start + _BATCH] for start in range(0, len(entries), _BATCH))


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


def _missing(key: Key, param: str | None = None) -> NotFound:
    what = key.kind.partition("_")[2] or key.kind
    name = key.id.rpartition(".")[2][:80]
    return NotFound(f"You have no {what} {name!a} here, or it was kept long enough.", param=param)


def _links(table: DocumentTable, key: Key, most: int) -> tuple[list[Key], Key | None]:
    """Some answers of a chain, the last first, and the one before them."""
    links: list[Key] = []
    num_bytes = 0
    while len(links) < _BATCH and num_bytes < _BATCH_BYTES:
        if len(links) == most:
            raise PayloadTooLarge(
                f"Over {MAX_MESSAGES} responses go before this one.", param="previous_response_id"
            )
        body, shown = _link(table, key)
        num_bytes += len(body)
        links.append(key)
        if shown.previous_response_id is None:
            return links, None
        key = Key(RESPONSE, shown.previous_response_id, key.owner)
    return links, key


def _link(table: DocumentTable, key: Key) -> tuple[bytes, _Link]:
    """An answer that others may go on from, as it is kept, and what of it matters for them."""
    document = table.get(key)
    if document is None:
        raise _missing(key, param="previous_response_id")
    link = decode_json(document.body, _Link)
    if link.status in UNFINISHED:
        raise InvalidRequest(
            f"The response {key.id[:80]!a} is still being made: wait for its end.",
            param="previous_response_id",
        )
    if link.conversation:
        raise InvalidRequest(
            f"The response {key.id[:80]!a} is part of a conversation: go on with conversation"
            f" {link.conversation['id']!a}.",
            param="previous_response_id",
        )
    return document.body, link


def _linked(table: DocumentTable, keys: Sequence[Key], allowance: _Allowance) -> list[bytes]:
    """Input and output of answers."""
    for key in keys:
        if table.get(key) is None:
            raise _missing(key, param="previous_response_id")
    table.renew(*keys)
    children = (_walk(table, key, kind) for key in keys for kind in (_INPUT, _OUTPUT))
    return [allowance.take(child.body) for some in children for child in some]


def _conversation(table: DocumentTable, key: Key, allowance: _Allowance) -> list[bytes]:
    if table.get(key) is None:
        raise _missing(key, param="conversation")
    table.renew(key)
    return [allowance.take(item.body) for item in _walk(table, key, _ITEM)]


def _referred(
    table: DocumentTable,
    item_ids: Sequence[str],
    allowance: _Allowance,
    *,
    owner: str,
    conversation_id: str,
) -> list[bytes]:
    """Items of answers, or of a conversation."""
    bodies = []
    for item_id in item_ids:
        inside = Key(_ITEM, _within(conversation_id, item_id), owner)
        document = table.get(Key(_OUTPUT, item_id, owner)) or table.get(inside)
        if document is None:
            raise NotFound(f"There is no item {item_id[:80]!a} here.", param="input")
        bodies.append(allowance.take(document.body))
    return bodies


def _walk(
    table: DocumentTable, parent: Key, kind: str, page: Page | None = None
) -> Iterator[Document]:
    """Children in the order of `page`, those behind its `after`; some are in memory at once."""
    page = replace(page or Page(limit=0), limit=_AT_ONCE)
    while documents := table.listed(parent.owner, kind, page, parent):
        yield from documents
        page = replace(page, after=documents[-1].key.id)


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
    """Add items, each with its pictures, which go with it."""
    added = []
    for shown in items:
        item, places = _with_pictures(shown, pictures)
        key = Key(kind, _within(parent.id, item["id"]), parent.owner)
        if table.get(key) is not None:  # its client sent it before
            item = {**item, "id": new_id(item["id"].partition("_")[0][:_PREFIX_CHARS])}
            key = Key(kind, _within(parent.id, item["id"]), parent.owner)
        table.add(Document(key=key, body=_json(item), parent=parent))
        for picture_id, picture in places.items():
            place = Key(_PICTURE, picture_id, parent.owner)
            table.add(Document(key=place, body=b"", parent=key))
            table.append(place, picture.data)
        added.append(item)
    return added


def _with_pictures(
    item: Shown, pictures: Mapping[str, Fetched]
) -> tuple[Shown, dict[str, Fetched]]:
    """The item with places of ours for its pictures, and what goes there, by id."""
    places: dict[str, Fetched] = {}
    content = item.get("content")
    if not pictures or not isinstance(content, list):
        return item, places

    def placed(part: Shown) -> Shown:
        found = pictures.get(part.get("image_url", ""))
        if found is None:
            return part
        picture_id = new_id("pic")
        places[picture_id] = found
        return {**part, "image_url": f"{KEPT_PLACE}{picture_id};{found.media_type}"}

    return {**item, "content": [placed(part) for part in content]}, places


def _page(table: DocumentTable, parent: Key, kind: str, page: Page) -> Sought:
    _there(table, parent)
    after = _within(parent.id, page.after) if page.after else ""
    items: list[Shown] = []
    num_bytes = 0
    for document in _walk(table, parent, kind, replace(page, after=after)):
        num_bytes += len(document.body)
        if len(items) == page.limit or (items and num_bytes > MAX_PAGE_BYTES):
            return Sought(items, has_more=True)
        items.append(msgspec.json.decode(document.body))
    return Sought(items, has_more=False)


def _end_abandoned(table: DocumentTable) -> None:
    """End answers that were being made when the server stopped without a word."""
    error = InternalError("The server stopped before this response was complete.")
    failed = {"status": "failed", "error": ResponseFailure.of(error).model_dump()}
    abandoned = table.with_status(RESPONSE, _RUNNING)
    for document in abandoned:
        table.replace(document.key, _json({**msgspec.json.decode(document.body), **failed}))
    if abandoned:
        _log.warning("%d responses were not complete when the server stopped", len(abandoned))

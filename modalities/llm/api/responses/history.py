"""The stored items that a new answer of the Responses API builds on, as JSON.

They are those of the chain of earlier answers, or of the conversation, that it continues, and those
that its input refers to by id. Owns finding and reading them, their limits in items and bytes, and
the refusal of answers that cannot be continued. Reading a chain or a conversation renews its
lifetime. A chain and references are read in several transactions, so that other calls can use the
store between them; a conversation is read in one. Writes no item, and knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from triptych.core.errors import InvalidRequest, NotFound, PayloadTooLarge
from triptych.core.limits import MAX_MESSAGES
from triptych.core.process.typed import decode_json
from triptych.core.store.documents import DocumentTable, Key
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.responses.layout import (
    CONVERSATION,
    INPUT,
    ITEM,
    OUTPUT,
    RESPONSE,
    load,
    walk,
    within,
)
from triptych.modalities.llm.api.responses.replies import UNFINISHED

_BATCH, _BATCH_BYTES = 64, 2**20
"""The limits of one transaction that reads a long history."""
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class History:
    """The items before an answer, and the items that its input refers to, each as JSON."""

    before: list[bytes]
    referred: list[bytes]

    @property
    def num_bytes(self) -> int:
        """The length of all items."""
        return sum(map(len, self.before)) + sum(map(len, self.referred))


class HistoryReader:
    """Reads histories from `store`; one history has at most `max_bytes`."""

    def __init__(self, store: DocumentStore, *, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    async def read(
        self,
        owner: str,
        response_id: str | None,
        conversation_id: str | None,
        item_ids: Sequence[str],
    ) -> History:
        """The history up to the end of an answer or a conversation, and the items of `item_ids`.

        Raises `NotFound`, `InvalidRequest`, and `PayloadTooLarge` for a history over the limits.
        """
        allowance, before, referred = _Allowance(self._max_bytes), [], []
        if response_id is not None:
            before = await self._chain(Key(RESPONSE, response_id, owner), allowance)
        elif conversation_id is not None:
            key = Key(CONVERSATION, conversation_id, owner)
            before = await self._store.call(_conversation, key, allowance)
        for some in _batches(item_ids):
            find = partial(_read_referred, owner=owner, conversation_id=conversation_id or "")
            referred += await self._store.call(find, some, allowance)
        return History(before, referred)

    async def _chain(self, last: Key, allowance: _Allowance) -> list[bytes]:
        """The items of a chain of answers, read in batches that leave the store free between."""
        links: list[Key] = []
        key: Key | None = last
        while key is not None:
            some, key = await self._store.call(_links, key, MAX_MESSAGES - len(links))
            links += some
        bodies = []
        for keys in _batches(links[::-1]):
            bodies += await self._store.call(_read_answers, keys, allowance)
        return bodies


class _Link(msgspec.Struct):
    """The fields of an answer that matter to answers which continue it."""

    status: str
    conversation: dict[str, str] | None = None
    previous_response_id: str | None = None


class _Allowance:
    """The rest of a history's limits, in bytes and items."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = self._num_items = 0

    def take(self, body: bytes) -> bytes:
        """Count one more item. Raises `PayloadTooLarge`."""
        self._num_bytes += len(body)
        self._num_items += 1
        if self._num_bytes > self._max_bytes or self._num_items > MAX_MESSAGES:
            raise PayloadTooLarge(
                f"The history is over {self._max_bytes} bytes or {MAX_MESSAGES} items: start"
                " another conversation."
            )
        return body


def _batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    return (entries[start : start + _BATCH] for start in range(0, len(entries), _BATCH))


def _links(table: DocumentTable, key: Key, most: int) -> tuple[list[Key], Key | None]:
    """A batch of answers of a chain, the last first, and the answer before them."""
    links: list[Key] = []
    num_bytes = 0
    while len(links) < _BATCH and num_bytes < _BATCH_BYTES:
        if len(links) == most:
            raise PayloadTooLarge(
                f"Over {MAX_MESSAGES} responses precede this one.", param="previous_response_id"
            )
        body, link = _link(table, key)
        num_bytes += len(body)
        links.append(key)
        if link.previous_response_id is None:
            return links, None
        key = Key(RESPONSE, link.previous_response_id, key.owner)
    return links, key


def _link(table: DocumentTable, key: Key) -> tuple[bytes, _Link]:
    """An answer that may be continued, as it is stored, and its link."""
    document = load(table, key, "previous_response_id")
    link = decode_json(document.body, _Link)
    if link.status in UNFINISHED:
        raise InvalidRequest(
            f"The response {key.id[:80]!a} is still in progress: wait for its end.",
            param="previous_response_id",
        )
    if link.conversation:
        raise InvalidRequest(
            f"The response {key.id[:80]!a} is part of a conversation: continue it with conversation"
            f" {link.conversation['id']!a}.",
            param="previous_response_id",
        )
    return document.body, link


def _read_answers(table: DocumentTable, keys: Sequence[Key], allowance: _Allowance) -> list[bytes]:
    """The input and output items of answers."""
    for key in keys:
        load(table, key, "previous_response_id")
    table.renew(*keys)
    children = (walk(table, key, kind) for key in keys for kind in (INPUT, OUTPUT))
    return [allowance.take(child.body) for some in children for child in some]


def _conversation(table: DocumentTable, key: Key, allowance: _Allowance) -> list[bytes]:
    load(table, key, "conversation")
    table.renew(key)
    return [allowance.take(item.body) for item in walk(table, key, ITEM)]


def _read_referred(
    table: DocumentTable,
    item_ids: Sequence[str],
    allowance: _Allowance,
    *,
    owner: str,
    conversation_id: str,
) -> list[bytes]:
    """The items of answers or of a conversation, by their ids."""
    bodies = []
    for item_id in item_ids:
        inside = Key(ITEM, within(conversation_id, item_id), owner)
        document = table.get(Key(OUTPUT, item_id, owner)) or table.get(inside)
        if document is None:
            raise NotFound(f"There is no item {item_id[:80]!a} here.", param="input")
        bodies.append(allowance.take(document.body))
    return bodies

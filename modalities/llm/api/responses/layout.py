"""The layout of answers and conversations in the store.

Owns the kinds of documents and their names: an answer or a conversation is a document, its items
and images are its children. Knows neither their content nor their use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from triptych.core.errors import NotFound
from triptych.core.store.documents import Document, DocumentTable, Key, Page

RESPONSE: Final = "response"
CONVERSATION: Final = "conversation"
INPUT: Final = "response_input"
OUTPUT: Final = "response_output"
ITEM: Final = "conversation_item"
IMAGE: Final = "image"
_AT_ONCE = 16


def within(parent_id: str, item_id: str) -> str:
    """The document name of an item, whose id may be the client's."""
    return f"{parent_id}.{item_id}"


def walk(
    table: DocumentTable, parent: Key, kind: str, page: Page | None = None
) -> Iterator[Document]:
    """Children in the order of `page`, after its `after`, loaded in batches."""
    page = replace(page or Page(limit=0), limit=_AT_ONCE)
    while documents := table.list_page(parent.owner, kind, page, parent):
        yield from documents
        page = replace(page, after=documents[-1].key.id)


def load(table: DocumentTable, key: Key, param: str | None = None) -> Document:
    """The document of a key. Raises `NotFound`."""
    document = table.get(key)
    if document is None:
        raise not_found(key, param)
    return document


def not_found(key: Key, param: str | None = None) -> NotFound:
    """The error about a missing document."""
    what = key.kind.partition("_")[2] or key.kind
    name = key.id.rpartition(".")[2][:80]
    return NotFound(f"There is no {what} {name!a}, or it has expired.", param=param)

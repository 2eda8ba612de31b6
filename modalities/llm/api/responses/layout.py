"""How answers and conversations lie in the store.

Owns the kinds of documents and their names: an answer or a conversation is a document, its items
and images are its children. Knows neither what is in them nor what is done with them.
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
    """The name of an item whose id its client chose."""
    return f"{parent_id}.{item_id}"


def walk(
    table: DocumentTable, parent: Key, kind: str, page: Page | None = None
) -> Iterator[Document]:
    """Children in the order of `page`, those behind its `after`; some are in memory at once."""
    page = replace(page or Page(limit=0), limit=_AT_ONCE)
    while documents := table.list_page(parent.owner, kind, page, parent):
        yield from documents
        page = replace(page, after=documents[-1].key.id)


def found(table: DocumentTable, key: Key, param: str | None = None) -> Document:
    """The document. Raises `NotFound`."""
    document = table.get(key)
    if document is None:
        raise missing(key, param)
    return document


def missing(key: Key, param: str | None = None) -> NotFound:
    """The error where a document is not there."""
    what = key.kind.partition("_")[2] or key.kind
    name = key.id.rpartition(".")[2][:80]
    return NotFound(f"You have no {what} {name!a} here, or it was kept long enough.", param=param)

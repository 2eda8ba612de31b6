"""Pages of items, of an answer's input or of a conversation.

Owns the query of a page and the inclusion of images on request.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.store.documents import Page
from triptych.modalities.llm.api.responses.archive import (
    MAX_PAGE_BYTES,
    Archive,
    FoundPage,
    ReplyFields,
)
from triptych.modalities.llm.api.responses.items import is_kept_image, shown_parts
from triptych.modalities.llm.api.responses.protocol import Include, Includes

_IMAGES = "message.input_image.image_url"


_NO_ENDS: Mapping[str, str | None] = MappingProxyType({"first_id": None, "last_id": None})


def _include_query(
    include: Annotated[Includes | None, Query()] = None,
    include_list: Annotated[Includes | None, Query(alias="include[]")] = None,
) -> list[Include]:
    return [*(include or ()), *(include_list or ())]


Included = Annotated[list[Include], Depends(_include_query)]
"""The additional content to show; clients write such a list in two ways."""


class PageQuery(BaseModel):
    """The query of a page of items."""

    after: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = ""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[Include] = []

    @property
    def store_page(self) -> Page:
        """The page as the store takes it."""
        return Page(limit=self.limit, after=self.after, is_descending=self.order == "desc")


def _page(
    include: Included,
    after: Annotated[str, Query(max_length=MAX_NAME_CHARS)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> PageQuery:
    return PageQuery(after=after, limit=limit, order=order, include=include)


ItemPage = Annotated[PageQuery, Depends(_page)]


async def item_list(archive: Archive, owner: str, found: FoundPage, page: PageQuery) -> Response:
    """The answer with a page; large images may shorten it, and the next page has the rest."""
    items: list[ReplyFields] = []
    num_bytes, has_more = 0, found.has_more
    for item in found.items:
        shown = await shown_item(archive, owner, item, page.include)
        num_bytes += sum(len(part.get("image_url") or "") for part in shown_parts(shown)[1])
        if items and num_bytes > MAX_PAGE_BYTES:
            has_more = True
            break
        items.append(shown)
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else _NO_ENDS
    return await json_answer({"object": "list", "data": items, **ends, "has_more": has_more})


async def json_answer(document: ReplyFields) -> Response:
    """The answer with a document, which is encoded on a thread."""
    encoded = await asyncio.to_thread(msgspec.json.encode, document)
    return Response(encoded, media_type="application/json")


async def shown_item(
    archive: Archive, owner: str, item: ReplyFields, include: Iterable[str] = ()
) -> ReplyFields:
    """An item with its images as data URLs if `include` asks for them, else without."""
    field, parts = shown_parts(item)
    if not any(is_kept_image(part.get("image_url")) for part in parts):
        return item
    has_images = _IMAGES in include
    shown = [
        await _part(archive, owner, part, has_images)
        if is_kept_image(part.get("image_url"))
        else part
        for part in parts
    ]
    return {**item, field: shown}


async def _part(
    archive: Archive, owner: str, part: dict[str, Any], has_images: bool
) -> dict[str, Any]:
    image = await archive.image(owner, part["image_url"]) if has_images else None
    if image is None:
        return {**part, "image_url": None}
    encoded = await asyncio.to_thread(base64.b64encode, image.data)
    url = f"data:{image.media_type};base64,{encoded.decode()}"
    return {**part, "image_url": url}

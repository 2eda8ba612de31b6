"""Pages of items, as both of an answer's input and of a conversation.

Owns what may be asked of a page, and that pictures are shown where that is asked for.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from pydantic import BaseModel, Field, StringConstraints

from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.store.documents import Page
from triptych.modalities.llm.api.responses.archive import Archive, Shown, Sought, is_kept_picture
from triptych.modalities.llm.api.responses.replies import ItemList

_PICTURES = "message.input_image.image_url"


IncludeList = list[Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]]


class PageQuery(BaseModel):
    """Which items, in which order, and what of them."""

    after: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = ""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[str] = []

    @property
    def wanted(self) -> Page:
        """The page as the store knows it."""
        return Page(limit=self.limit, after=self.after, is_descending=self.order == "desc")


def _page(
    after: Annotated[str, Query(max_length=MAX_NAME_CHARS)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    include: Annotated[IncludeList | None, Query(max_length=64)] = None,
    include_list: Annotated[IncludeList | None, Query(alias="include[]", max_length=64)] = None,
) -> PageQuery:
    return PageQuery(
        after=after, limit=limit, order=order, include=[*(include or ()), *(include_list or ())]
    )


ItemPage = Annotated[PageQuery, Depends(_page)]


async def item_list(archive: Archive, owner: str, found: Sought, page: PageQuery) -> ItemList:
    """The list that is returned."""
    items = await shown_items(archive, owner, found.items, page.include)
    ids = [item["id"] for item in items]
    return ItemList(
        data=items,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=found.has_more,
    )


async def shown_items(
    archive: Archive, owner: str, items: Iterable[Shown], include: Iterable[str] = ()
) -> list[Shown]:
    """Items with the pictures in them, as data URLs, or without."""
    has_pictures = _PICTURES in include
    return [await _shown(archive, owner, item, has_pictures) for item in items]


async def _shown(archive: Archive, owner: str, item: Shown, has_pictures: bool) -> Shown:
    content = item.get("content")
    if not isinstance(content, list):
        return item
    parts = [
        await _part(archive, owner, part, has_pictures)
        if is_kept_picture(part.get("image_url", ""))
        else part
        for part in content
    ]
    return {**item, "content": parts}


async def _part(
    archive: Archive, owner: str, part: dict[str, Any], has_pictures: bool
) -> dict[str, Any]:
    picture = await archive.picture(owner, part["image_url"]) if has_pictures else None
    if picture is None:
        return {**part, "image_url": None}
    encoded = await asyncio.to_thread(base64.b64encode, picture.data)
    url = f"data:{picture.media_type};base64,{encoded.decode()}"
    return {**part, "image_url": url}

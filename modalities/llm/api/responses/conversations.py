"""`/v1/conversations`: stored items for later answers.

Owns these routes. `archive` stores the conversations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from triptych.core.http.body import StrictRoute
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.limits import MAX_NAME_CHARS
from triptych.modalities.llm.api.responses.answering import Answering
from triptych.modalities.llm.api.responses.archive import FoundPage, KeptRequest
from triptych.modalities.llm.api.responses.images import image_urls, sent_images
from triptych.modalities.llm.api.responses.items import KeptItem, new_id
from triptych.modalities.llm.api.responses.layout import CONVERSATION
from triptych.modalities.llm.api.responses.lists import (
    Included,
    ItemPage,
    PageQuery,
    item_list,
    json_answer,
    shown_item,
)
from triptych.modalities.llm.api.responses.protocol import (
    ConversationChange,
    ConversationRequest,
    ItemsRequest,
)
from triptych.modalities.llm.api.responses.replies import (
    ConversationDeleted,
    ConversationReply,
    ItemList,
)
from triptych.modalities.llm.api.responses.routes import ImageItemsRoute, owner_of

_ROUTE = "/v1/conversations"
_ONE = _ROUTE + "/{conversation_id}"
_Id = Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]


def conversations_router(answering: Answering) -> APIRouter:
    """The routes of conversations in the archive of `answering`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["responses"])
    _add_conversations(router, answering)
    _add_items(router, answering)
    return router


def _add_conversations(router: APIRouter, answering: Answering) -> None:
    async def create_conversation(body: ConversationRequest, request: Request) -> ConversationReply:
        """Create a conversation, with or without items."""
        reply = ConversationReply(
            id=new_id("conv"),
            object="conversation",
            created_at=int(time.time()),
            metadata=body.metadata or {},
        )
        kept = _kept_request(body.items or (), request)
        await answering.archive.add_conversation(owner_of(request), reply.model_dump(), kept)
        return reply

    router.add_api_route(
        _ROUTE, create_conversation, methods=["POST"], route_class_override=ImageItemsRoute
    )

    @router.get(_ONE)
    async def show_conversation(conversation_id: _Id, request: Request) -> ConversationReply:
        """Return a conversation without its items."""
        shown = await answering.archive.conversation(owner_of(request), conversation_id)
        return ConversationReply(**shown)

    @router.post(_ONE)
    async def change_conversation(
        conversation_id: _Id, body: ConversationChange, request: Request
    ) -> ConversationReply:
        """Replace a conversation's metadata."""
        shown = await answering.archive.relabel(owner_of(request), conversation_id, body.metadata)
        return ConversationReply(**shown)

    @router.delete(_ONE)
    async def delete_conversation(conversation_id: _Id, request: Request) -> ConversationDeleted:
        """Delete a conversation with its items. Answers that were part of it remain."""
        await answering.archive.delete(owner_of(request), CONVERSATION, conversation_id)
        return ConversationDeleted(id=conversation_id)


def _add_items(router: APIRouter, answering: Answering) -> None:
    async def add_items(conversation_id: _Id, body: ItemsRequest, request: Request) -> Response:
        """Add items to a conversation."""
        owner, kept = owner_of(request), _kept_request(body.items, request)
        added = await answering.archive.extend(owner, conversation_id, kept)
        return await item_list(
            answering.archive, owner, FoundPage(added, has_more=False), PageQuery()
        )

    router.add_api_route(
        f"{_ONE}/items",
        add_items,
        methods=["POST"],
        response_model=ItemList,
        route_class_override=ImageItemsRoute,
    )

    @router.get(f"{_ONE}/items", response_model=ItemList)
    async def list_items(conversation_id: _Id, request: Request, page: ItemPage) -> Response:
        """The items of a conversation."""
        owner = owner_of(request)
        found = await answering.archive.items(owner, conversation_id, page.store_page)
        return await item_list(answering.archive, owner, found, page)

    @router.get(f"{_ONE}/items/{{item_id}}", response_model=None)
    async def show_item(
        conversation_id: _Id,
        item_id: _Id,
        request: Request,
        include: Included,
    ) -> Response:
        """One item of a conversation."""
        owner = owner_of(request)
        item = await answering.archive.item(owner, conversation_id, item_id)
        return await json_answer(await shown_item(answering.archive, owner, item, include))

    @router.delete(f"{_ONE}/items/{{item_id}}")
    async def delete_item(
        conversation_id: _Id, item_id: _Id, request: Request
    ) -> ConversationReply:
        """Delete one item; returns the conversation."""
        shown = await answering.archive.delete_item(owner_of(request), conversation_id, item_id)
        return ConversationReply(**shown)


def _kept_request(items: Sequence[KeptItem], request: Request) -> KeptRequest:
    """The items to store, with their images."""
    return KeptRequest(items, sent_images(image_urls(items), request))

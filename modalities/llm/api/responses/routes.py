"""`/v1/responses`: creates, returns, streams, cancels and deletes answers.

Owns these routes. `answering` generates the answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope

from triptych.core.errors import Draining, InvalidRequest, UnsupportedOption
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.data_urls import DataUrlRoute, FilePlace
from triptych.core.http.disconnect import DisconnectWatcher
from triptych.core.http.errors import ERROR_RESPONSES, to_public
from triptych.core.http.json_writer import write_json
from triptych.core.http.sse import EventStream, described
from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.text.threads import on_text_thread
from triptych.modalities.llm.api.responses.answering import Answering
from triptych.modalities.llm.api.responses.background import BackgroundRun
from triptych.modalities.llm.api.responses.conversation import CHAT_NAMES
from triptych.modalities.llm.api.responses.events import (
    STREAM_EVENTS,
    WHOLE_EVENTS,
    ErrorEvent,
    ResponseEvent,
    WrittenEvent,
)
from triptych.modalities.llm.api.responses.layout import RESPONSE
from triptych.modalities.llm.api.responses.lists import Included, ItemPage, item_list, json_answer
from triptych.modalities.llm.api.responses.protocol import ResponseInput, ResponseRequest
from triptych.modalities.llm.api.responses.replies import (
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseReply,
)
from triptych.modalities.llm.api.translation import rename_error

ResponseId = Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]
_ROUTE = "/v1/responses"
_Obfuscation = Annotated[
    bool | None, Query(description="Accepted, and without effect: chunks are not padded.")
]
_MANY_EVENTS = 64
"""After this number of events, events with the whole answer are serialized on a thread."""
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ResponseReply,
        "content": described(*STREAM_EVENTS, error=ErrorEvent),
        "description": "The answer.",
    }
}


class ImageItemsRoute(DataUrlRoute):
    """A route whose body may hold images in `image_url` of items."""

    place = FilePlace(
        re.compile(rb'"image_url"\s{0,8}:\s{0,8}"data:(?:[\w.+;=-]|\\?/){0,100}?;base64,'),
        images=frozenset(
            (items, parts, "image_url")
            for items in ("input", "items")
            for parts in ("content", "output")
        ),
        field="image_url",
    )


class ResponseStream(EventStream):
    """Streams the events of an answer; a failure becomes an error event of this API."""

    def __init__(self, events: AsyncGenerator[ResponseEvent, None], heartbeat_s: float) -> None:
        super().__init__(events, heartbeat_s=heartbeat_s, end=b"", is_named=True)
        self._next_number = 0

    async def _written(self, document: BaseModel) -> BaseModel:
        if not isinstance(document, WHOLE_EVENTS) or document.sequence_number <= _MANY_EVENTS:
            return document
        number = document.sequence_number
        line = await on_text_thread(number, write_json, document)
        return WrittenEvent(type=document.type, sequence_number=number, json_line=line)

    def _frame(self, document: BaseModel) -> bytes:
        if isinstance(document, ResponseEvent):
            self._next_number = document.sequence_number + 1
        return super()._frame(document)

    def _last_words(self, error: BaseException, scope: Scope) -> BaseModel:
        public = rename_error(to_public(error), CHAT_NAMES)
        return ErrorEvent(
            type="error",
            sequence_number=self._next_number,
            code=public.code,
            message=public.message,
            param=public.param,
        )


def responses_router(answering: Answering) -> APIRouter:
    """The routes, in front of `answering`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["responses"])
    _add_creation(router, answering)
    _add_retrieval(router, answering)
    _add_ends(router, answering)
    return router


def _add_creation(router: APIRouter, answering: Answering) -> None:
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer items, after an earlier answer or a conversation if there is one."""
        heartbeat_s = Context.of(request).options.heartbeat_s
        answer = await answering.begin(body, request)
        if body.background:
            run = await answering.in_background(answer, request, is_streamed=bool(body.stream))
            if body.stream:
                return ResponseStream(_follow(run, -1, request), heartbeat_s)
            return await _json(run.response)
        if body.stream:
            return ResponseStream(answering.stream(answer, request), heartbeat_s)
        return await _json(await answering.whole(answer))

    async def count_input_tokens(body: ResponseInput, request: Request) -> InputTokens:
        """Count the tokens of the prompt of an answer."""
        prepared = await answering.prepare(body, request)
        return InputTokens(input_tokens=len(prepared.prompt.prompt_ids))

    async def refuse_compaction() -> NoReturn:
        raise UnsupportedOption(
            "Conversations are not compacted here: ask for a summary, and continue from that."
        )

    options: dict[str, Any] = {"methods": ["POST"], "route_class_override": ImageItemsRoute}
    router.add_api_route(_ROUTE, create_response, response_model=None, responses=_STREAM, **options)
    router.add_api_route(f"{_ROUTE}/input_tokens", count_input_tokens, **options)
    router.add_api_route(
        f"{_ROUTE}/compact",
        refuse_compaction,
        methods=["POST"],
        response_model=None,
        include_in_schema=False,
    )


def _add_retrieval(router: APIRouter, answering: Answering) -> None:
    @router.get(_ROUTE + "/{response_id}", response_model=None, responses=_STREAM)
    async def show_response(
        response_id: ResponseId,
        request: Request,
        include: Included,
        stream: bool = False,
        include_obfuscation: _Obfuscation = None,
        starting_after: Annotated[int | None, Query(ge=-1, le=2**31)] = None,
    ) -> Response:
        """Return an answer; with `stream` the events of a background answer, from any event on.

        `include` is without effect.
        """
        owner, heartbeat_s = owner_of(request), Context.of(request).options.heartbeat_s
        if starting_after is not None and not stream:
            raise InvalidRequest("starting_after goes with stream=true.", param="starting_after")
        if not stream:
            return await json_answer(await answering.shown(owner, response_id))
        after = -1 if starting_after is None else starting_after
        run = answering.runs.find(owner, response_id)
        if run is not None:
            return ResponseStream(_follow(run, after, request), heartbeat_s)
        await answering.archive.response(owner, response_id)
        events = answering.archive.events(owner, response_id)
        return ResponseStream(_replay(events, after), heartbeat_s)

    @router.get(_ROUTE + "/{response_id}/input_items", response_model=ItemList)
    async def list_input_items(
        response_id: ResponseId, request: Request, page: ItemPage
    ) -> Response:
        """List the input items of an answer."""
        owner = owner_of(request)
        found = await answering.archive.inputs(owner, response_id, page.store_page)
        return await item_list(answering.archive, owner, found, page)


def _add_ends(router: APIRouter, answering: Answering) -> None:
    @router.post(_ROUTE + "/{response_id}/cancel", response_model=None, responses=_STREAM)
    async def cancel_response(response_id: ResponseId, request: Request) -> Response:
        """Cancel a background answer in progress."""
        owner = owner_of(request)
        await answering.runs.cancel(owner, response_id)
        shown = await answering.shown(owner, response_id)
        if shown["status"] != "cancelled":
            raise InvalidRequest(
                f"The response is {shown['status']}: only a background response in progress can be"
                " cancelled.",
                param="response_id",
            )
        return await json_answer(shown)

    @router.delete(_ROUTE + "/{response_id}")
    async def delete_response(response_id: ResponseId, request: Request) -> ResponseDeleted:
        """Delete an answer; one in progress is cancelled."""
        owner = owner_of(request)
        await answering.runs.forget(owner, response_id)
        await answering.archive.delete(owner, RESPONSE, response_id)
        return ResponseDeleted(id=response_id)


async def _follow(
    run: BackgroundRun, after: int, request: Request
) -> AsyncGenerator[ResponseEvent, None]:
    """The events of a run; a drain ends the run first, so the last event is among them."""
    watcher: DisconnectWatcher = request.state.watcher
    while True:
        try:
            async for event in run.follow(after):
                yield event
                after = event.sequence_number
        except asyncio.CancelledError:
            reason = watcher.take_reason()
            if reason is None:
                raise
            if not isinstance(reason, Draining):
                raise reason from None
            await run.wait_ended()
        else:
            return


async def _replay(
    lines: AsyncGenerator[bytes, None], after: int
) -> AsyncGenerator[ResponseEvent, None]:
    """Stored events after a sequence number."""
    is_streamed = False
    async with aclosing(lines):
        async for line in lines:
            is_streamed = True
            event = WrittenEvent.kept(line)
            if event.sequence_number > after:
                yield event
    if not is_streamed:
        raise InvalidRequest(
            "Only a response created with background and stream can be streamed again.",
            param="stream",
        )


async def _json(reply: ResponseReply) -> Response:
    num_tokens = 0 if reply.usage is None else reply.usage.total_tokens
    document = await on_text_thread(num_tokens, write_json, reply)
    return Response(document, media_type="application/json")


def owner_of(request: Request) -> str:
    """The owner of a request's answers and conversations."""
    return Context.of(request).principal.owner

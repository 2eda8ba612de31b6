"""From the body of a request to its answer: whole, streamed, or in the background.

Owns the order of the steps: read the history, translate it to a chat request, generate the answer,
store it. Knows neither the routes nor how answers are stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from fastapi import Request

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import (
    NotFound,
    PayloadTooLarge,
    StoreFull,
    TriptychError,
    Unavailable,
    UnsupportedOption,
)
from triptych.core.http.body import note_ignored
from triptych.core.http.context import Context
from triptych.core.http.errors import to_public
from triptych.core.http.json_writer import write_json
from triptych.core.http.sse import log_broken
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields
from triptych.core.store.store import DocumentStore
from triptych.core.text.threads import on_text_thread_if_long
from triptych.modalities.llm.api.generation import (
    Generation,
    begin,
    chat_request,
    encode_conversation,
    note_reasoning,
)
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.responses.archive import Archive, KeptRequest, ReplyFields
from triptych.modalities.llm.api.responses.background import BackgroundRun, BackgroundRuns
from triptych.modalities.llm.api.responses.builder import ResponseBuilder
from triptych.modalities.llm.api.responses.conversation import CHAT_NAMES, chat_fields
from triptych.modalities.llm.api.responses.events import ResponseEvent
from triptych.modalities.llm.api.responses.history import History
from triptych.modalities.llm.api.responses.images import (
    HeldImages,
    image_urls,
    sent_images,
)
from triptych.modalities.llm.api.responses.items import (
    ItemReference,
    KeptItem,
    MessageItem,
    is_kept_image,
    kept_items,
)
from triptych.modalities.llm.api.responses.protocol import ResponseInput, ResponseRequest
from triptych.modalities.llm.api.responses.replies import ResponseReply, first_fields
from triptych.modalities.llm.api.samples import SampleDelta
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.translation import rename_error, rename_errors
from triptych.modalities.modality import FindLink, no_link

Events = AsyncGenerator[ResponseEvent, None]
_PATIENCE_S = 0.05
"""The wait before a stream's first events, so that refused work is answered with an error."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """A request as a chat request, its prompt, and the items and images to store."""

    chat: ChatRequest
    prompt: TokenRequest
    items: Sequence[KeptItem]
    images: HeldImages


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """An answer in progress, with its owner."""

    owner: str
    items: Sequence[KeptItem]
    images: HeldImages
    builder: ResponseBuilder
    generation: Generation

    @property
    def kept_request(self) -> KeptRequest:
        """The part of the request to store."""
        return KeptRequest(self.items, self.images)

    async def made(
        self, first: Iterable[ResponseEvent], *, patience_s: float | None = None
    ) -> Events:
        """The events except the last: `first`, then those of the model's deltas.

        `first` come at the model's first delta, or after `patience_s`, so that a refusal within
        that time raises before any event.
        """
        async with aclosing(self.generation.deltas) as deltas, _begun(deltas) as opening:
            await asyncio.wait((opening,), timeout=patience_s)
            if opening.done():
                opening.result()
            for event in first:
                yield event
            for event in self.builder.push(await opening):
                yield event
            async for delta in deltas:
                for event in self.builder.push(delta):
                    yield event
        for event in self.builder.close(self.generation.usage.total()):
            yield event


@asynccontextmanager
async def _begun(
    deltas: AsyncGenerator[SampleDelta, None],
) -> AsyncIterator[asyncio.Task[SampleDelta]]:
    """A task that awaits the first delta; it ends with this context."""
    opening = asyncio.ensure_future(anext(deltas))
    try:
        yield opening
    finally:
        opening.cancel()
        await asyncio.wait((opening,))
        if not opening.cancelled():
            opening.exception()  # or asyncio would log it


class Answering:
    """Answers requests with `service`; `archive` stores answers, if any are stored."""

    def __init__(self, service: LlmService, archive: Archive | None, find_link: FindLink) -> None:
        self._service = service
        self._archive = archive
        self._find_link = find_link
        self._left_out: set[str] = set()  # kinds of tools that the log has
        self.runs = BackgroundRuns()

    @classmethod
    def open(
        cls,
        service: LlmService,
        store: DocumentStore | None,
        options: ServerOptions,
        find_link: FindLink = no_link,
    ) -> Self:
        """Open with an archive in `store`, if there is a store."""
        archive = Archive(store, max_bytes=options.max_request_bytes) if store else None
        return cls(service, archive, find_link)

    @property
    def archive(self) -> Archive:
        """The archive of answers. Raises `UnsupportedOption` if there is none."""
        if self._archive is None:
            raise _nothing_kept()
        return self._archive

    async def shown(self, owner: str, response_id: str) -> ReplyFields:
        """An answer so far. Raises `NotFound`."""
        run = self.runs.find(owner, response_id)
        if run is not None:
            return run.response.model_dump(mode="json", exclude_unset=True)
        return await self.archive.response(owner, response_id)

    async def prepare(
        self, body: ResponseInput, request: Request, *, is_kept: bool = False
    ) -> PreparedInput:
        """The prompt of a request, and its images if it is stored. Raises the request's errors."""
        self._note_left_out(request, body.tool_set.left_out)
        note_reasoning(request, self._service.model(body.model), body.thinking_fields)
        history = await self._history(body, Context.of(request).principal.owner)
        num_bytes = len(await request.body()) + history.num_bytes
        with rename_errors(CHAT_NAMES):
            conversation = await on_text_thread_if_long(num_bytes, _parse, body, history)
            sent = sent_images(conversation.urls, request) if is_kept else {}
            prompt = await self._encode(conversation, request)
        images = HeldImages.of(request)
        for url, image in sent.items():
            images.hold(url, image)
        return PreparedInput(conversation.chat, prompt, conversation.items, images)

    def _note_left_out(self, request: Request, tools: Sequence[str]) -> None:
        """Report tools as ignored, and log each kind once."""
        note_ignored(request, *tools)
        for tool in tools:
            if tool not in self._left_out:
                self._left_out.add(tool)
                _log.warning("left out of prompts: only clients run tools", extra=fields(tool=tool))

    async def begin(self, body: ResponseRequest, request: Request) -> PendingAnswer:
        """Begin an answer. Raises the request's errors before anything runs."""
        context = Context.of(request)
        is_stored = self._archive is not None and body.store is not False
        if body.background and not is_stored:
            raise _nothing_kept()
        is_kept = is_stored or body.conversation_id is not None
        prepared = await self.prepare(body, request, is_kept=is_kept)
        model = self._service.model(body.model)
        response_id = f"resp_{context.call_id}"
        first = first_fields(body, response_id, model.default_sampling, is_kept=is_stored)
        builder = ResponseBuilder(first, body.tool_set.places, has_logprobs=body.has_logprobs)
        if body.background:  # no client waits for it
            context = replace(context, limit_s=None)
        with rename_errors(CHAT_NAMES):
            generation = await begin(self._service, prepared.chat, context, [prepared.prompt])
        owner, items = context.principal.owner, prepared.items
        return PendingAnswer(owner, items, prepared.images, builder, generation)

    async def whole(self, answer: PendingAnswer) -> ResponseReply:
        """The complete answer."""
        try:
            with rename_errors(CHAT_NAMES):
                async with aclosing(answer.made(answer.builder.begin())) as events:
                    async for _ in events:
                        pass
            await self._keep(answer)
        finally:
            answer.images.close()
        return answer.builder.response

    async def stream(self, answer: PendingAnswer, request: Request) -> Events:
        """The events of an answer; a failure after the first event becomes the last event."""
        has_begun = False
        try:
            made = answer.made(answer.builder.begin(), patience_s=_PATIENCE_S)
            async with aclosing(made) as events:
                async for event in events:
                    has_begun = True
                    yield event
            await self._keep(answer)
        except Exception as error:
            public = rename_error(to_public(error), CHAT_NAMES)
            if not has_begun:
                raise public from error
            log_broken(error, request.scope)
            answer.builder.fail(public)
        finally:
            answer.images.close()
        yield answer.builder.last()

    async def in_background(
        self, answer: PendingAnswer, request: Request, *, is_streamed: bool
    ) -> BackgroundRun:
        """Begin an answer in the background; if it is streamed, its events are stored."""
        archive, builder, state = self.archive, answer.builder, request.app.state
        try:
            self.runs.check(answer.owner)
        except TriptychError:
            answer.images.close()
            raise

        async def start() -> None:
            await archive.begin(answer.owner, builder.response, answer.kept_request)
            if builder.response.conversation is None:
                answer.images.close()

        async def keep(events: Sequence[ResponseEvent]) -> None:
            try:
                lines = await asyncio.to_thread(_lines, events if is_streamed else ())
                await archive.complete(answer.owner, builder.response, answer.kept_request, lines)
            finally:
                answer.images.close()

        run = BackgroundRun(builder, answer.made(builder.start()), start, keep)
        gate = None if is_streamed else state.gate
        self.runs.start(answer.owner, run, state.in_flight, gate)
        await run.wait_begun()
        return run

    async def _keep(self, answer: PendingAnswer) -> None:
        """Store an answer if possible; a failure to store it does not withhold the answer."""
        response = answer.builder.response
        if self._archive is None or not (response.store or response.conversation):
            return
        try:
            await self._archive.complete(answer.owner, response, answer.kept_request)
        except (StoreFull, Unavailable) as error:
            if response.conversation is not None:
                raise
            _log.warning("a response was not kept: %s", error.message)
            answer.builder.forget()

    async def _history(self, body: ResponseInput, owner: str) -> History:
        given = () if isinstance(body.input, str) else body.input or ()
        item_ids = [item.id for item in given if isinstance(item, ItemReference)]
        places = (body.previous_response_id, body.conversation_id)
        if places == (None, None) and not item_ids:
            return History([], [])
        return await self.archive.history.read(owner, *places, item_ids)

    async def _encode(self, conversation: _Conversation, request: Request) -> TokenRequest:
        kept = HeldImages.of(request)

        def find(url: str, request: Request) -> Fetched | None:
            return kept.get(url) or self._find_link(url, request)

        try:
            await self._read_images(conversation.urls, Context.of(request), kept)
            return await encode_conversation(self._service, conversation.chat, request, find)
        finally:
            kept.close()

    async def _read_images(self, urls: Iterable[str], context: Context, kept: HeldImages) -> None:
        most = context.options.max_image_request_bytes
        num_bytes = 0
        for url in filter(is_kept_image, urls):
            image = await self.archive.image(context.principal.owner, url)
            if image is None:
                raise NotFound("An image of this conversation has expired.")
            num_bytes += len(image.data)
            if num_bytes > most:
                raise PayloadTooLarge(f"The images of the history are over {most} bytes.")
            kept.hold(url, image)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The items of a request, the chat request with its history, and the URLs of all images."""

    items: list[KeptItem]
    chat: ChatRequest
    urls: list[str]


def _parse(body: ResponseInput, history: History) -> _Conversation:
    """Translate a request and its history, in one call for a thread."""
    referred = iter(kept_items(history.referred))
    given = body.input or ()
    if isinstance(given, str):
        items: list[KeptItem] = [MessageItem(role="user", content=given)]
    else:
        items = [next(referred) if isinstance(item, ItemReference) else item for item in given]
    whole = [*kept_items(history.before), *items]
    urls = list(dict.fromkeys(image_urls(whole)))
    return _Conversation(items, chat_request(chat_fields(body, whole)), urls)


def _nothing_kept() -> UnsupportedOption:
    return UnsupportedOption(
        "Nothing is stored here (the operator has --store off): send the whole conversation in"
        " input."
    )


def _lines(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(write_json(event) + b"\n" for event in events)

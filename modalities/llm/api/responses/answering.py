"""From the body of a request to its answer, whole, as it is made, or while nobody waits.

Owns the order of the steps: what goes before is found, all of it becomes a chat request, that is
answered, the answer is kept. What routes there are, and how things are kept, is said elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self

from fastapi import Request

from triptych.core.config import ServerOptions
from triptych.core.errors import (
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StoreFull,
    Unavailable,
    UnsupportedOption,
)
from triptych.core.http.context import Context
from triptych.core.http.data_urls import data_urls
from triptych.core.http.errors import to_public
from triptych.core.http.sse import log_broken
from triptych.core.media.fetch import Fetched
from triptych.core.store.store import DocumentStore
from triptych.core.tokens import TokenRequest
from triptych.modalities.llm.api.generation import (
    Generation,
    begin,
    chat_request,
    encode_conversation,
)
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.responses.archive import Archive, Belongings, is_kept_picture
from triptych.modalities.llm.api.responses.background import BackgroundRun, BackgroundRuns
from triptych.modalities.llm.api.responses.builder import ResponseBuilder
from triptych.modalities.llm.api.responses.conversation import chat_fields, in_own_words, renamed
from triptych.modalities.llm.api.responses.events import ResponseEvent
from triptych.modalities.llm.api.responses.items import (
    KEPT_ITEM,
    ItemReference,
    KeptItem,
    MessageItem,
)
from triptych.modalities.llm.api.responses.protocol import ResponseInput, ResponseRequest
from triptych.modalities.llm.api.responses.replies import ResponseReply, begun
from triptych.modalities.llm.api.service import LlmService, SampleDelta
from triptych.modalities.modality import FindLink, no_link

Events = AsyncGenerator[ResponseEvent, None]
_LONG_BYTES, _MANY = 2**16, 256
"""Of what goes before, and of items: more are read on a thread."""
_PATIENCE_S = 0.05
"""For a stream's first events; work that is not let in is refused before."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """A request in the words of chat, its prompt, and what of it is to be kept."""

    chat: ChatRequest
    prompt: TokenRequest
    given: Belongings


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """An answer that is being made, and for whom."""

    owner: str
    given: Belongings
    builder: ResponseBuilder
    generation: Generation

    async def made(
        self, first: Iterable[ResponseEvent], *, patience_s: float | None = None
    ) -> Events:
        """Its events but the last: `first`, and what the model says.

        `first` come when the model has begun, or after `patience_s`: what is refused is so at once,
        and then there are none.
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
    """The first delta, awaited on a task, which is over when this is."""
    opening = asyncio.ensure_future(anext(deltas))
    try:
        yield opening
    finally:
        opening.cancel()
        await asyncio.wait((opening,))
        if not opening.cancelled():
            opening.exception()  # somebody has looked at it


class Answering:
    """Answers requests with `service`; `archive` keeps answers, if any are kept."""

    def __init__(self, service: LlmService, archive: Archive | None, find_link: FindLink) -> None:
        self._service = service
        self._archive = archive
        self._find_link = find_link
        self.runs = BackgroundRuns()

    @classmethod
    def open(
        cls,
        service: LlmService,
        store: DocumentStore | None,
        options: ServerOptions,
        find_link: FindLink = no_link,
    ) -> Self:
        """With an archive in `store`, if there is one."""
        archive = Archive(store, max_bytes=options.max_request_bytes) if store else None
        return cls(service, archive, find_link)

    @property
    def archive(self) -> Archive:
        """What keeps answers. Raises `UnsupportedOption` where nothing does."""
        if self._archive is None:
            raise _nothing_kept()
        return self._archive

    async def prepare(self, body: ResponseInput, request: Request) -> PreparedInput:
        """The prompt of a request. Raises what is wrong with it."""
        owner = Context.of(request).principal.owner
        before = await self._before(body, owner)
        items = await self._given(body, owner)
        pictures = sent_pictures(items, request)
        kept = await self._kept_pictures([*before, *items], Context.of(request))

        def find(url: str, request: Request) -> Fetched | None:
            return kept.get(url) or self._find_link(url, request)

        with in_own_words():
            chat = await _in_chat(body, [*before, *items])
            prompt = await encode_conversation(self._service, chat, request, find)
        return PreparedInput(chat, prompt, Belongings(items, pictures))

    async def begin(self, body: ResponseRequest, request: Request) -> PendingAnswer:
        """Begin an answer. Raises what is wrong with the request before anything runs."""
        context = Context.of(request)
        is_kept = self._archive is not None and body.store is not False
        if body.background and not is_kept:
            raise _nothing_kept()
        prepared = await self.prepare(body, request)
        model = self._service.model(body.model)
        response_id = f"resp_{context.call_id}"
        fields = begun(body, response_id, model.default_sampling, is_kept=is_kept)
        builder = ResponseBuilder(fields, has_logprobs=body.has_logprobs)
        with in_own_words():
            generation = await begin(self._service, prepared.chat, context, [prepared.prompt])
        return PendingAnswer(context.principal.owner, prepared.given, builder, generation)

    async def whole(self, answer: PendingAnswer) -> ResponseReply:
        """The answer, when it is all there."""
        with in_own_words():
            async with aclosing(answer.made(answer.builder.begin())) as events:
                async for _ in events:
                    pass
        await self._keep(answer)
        return answer.builder.response

    async def streamed(self, answer: PendingAnswer, request: Request) -> Events:
        """The answer as it is made; one that fails after it has begun says so itself."""
        has_begun = False
        try:
            made = answer.made(answer.builder.begin(), patience_s=_PATIENCE_S)
            async with aclosing(made) as events:
                async for event in events:
                    has_begun = True
                    yield event
            await self._keep(answer)
        except Exception as error:
            public = renamed(to_public(error))
            if not has_begun:
                raise public from error
            log_broken(error, request.scope)
            answer.builder.fail(public)
        yield answer.builder.last()

    async def in_background(
        self, answer: PendingAnswer, request: Request, *, is_streamed: bool
    ) -> BackgroundRun:
        """Begin to make the answer while nobody waits; if it is streamed, its events are kept."""
        archive, builder = self.archive, answer.builder

        async def keep(events: Sequence[ResponseEvent]) -> None:
            lines = await asyncio.to_thread(_lines, events if is_streamed else ())
            await archive.complete(answer.owner, builder.response, answer.given, lines)

        run = BackgroundRun(builder, answer.made(builder.start()), keep)
        await archive.begin(answer.owner, builder.response, answer.given)
        self.runs.start(answer.owner, run, request.app.state.in_flight)
        return run

    async def _keep(self, answer: PendingAnswer) -> None:
        """Keep an answer where it can be: it is given in any case."""
        response = answer.builder.response
        if self._archive is None or not (response.store or response.conversation):
            return
        try:
            await self._archive.complete(answer.owner, response, answer.given)
        except (StoreFull, Unavailable) as error:
            if response.conversation is not None:
                raise
            _log.warning("a response was not kept: %s", error.message)
            answer.builder.forget()

    async def _before(self, body: ResponseInput, owner: str) -> list[KeptItem]:
        if body.previous_response_id is not None:
            found = await self.archive.before(owner, body.previous_response_id)
        elif body.conversation_id is not None:
            found = await self.archive.said_in(owner, body.conversation_id)
        else:
            return []
        if sum(map(len, found)) <= _LONG_BYTES:
            return _parsed(found)
        return await asyncio.to_thread(_parsed, found)

    async def _given(self, body: ResponseInput, owner: str) -> list[KeptItem]:
        if isinstance(body.input, str):
            return [MessageItem(role="user", content=body.input)]
        items: list[KeptItem] = []
        for item in body.input or ():
            if isinstance(item, ItemReference):
                found = await self.archive.referred(owner, item.id, body.conversation_id)
                items += _parsed([found])
            else:
                items.append(item)
                if any(map(is_kept_picture, picture_urls([item]))):
                    raise InvalidRequest("That is no picture's URL.", param="input")
        return items

    async def _kept_pictures(
        self, items: Sequence[KeptItem], context: Context
    ) -> dict[str, Fetched]:
        found: dict[str, Fetched] = {}
        most = context.options.max_picture_request_bytes
        for url in filter(is_kept_picture, picture_urls(items)):
            picture = await self.archive.picture(context.principal.owner, url)
            if picture is None:
                raise NotFound("A picture of this conversation is not kept any more.")
            found[url] = picture
            if sum(len(each.data) for each in found.values()) > most:
                raise PayloadTooLarge(f"The pictures that go before are over {most} bytes.")
        return found


def _nothing_kept() -> UnsupportedOption:
    return UnsupportedOption(
        "Nothing is kept here (the operator has --store off): send the whole conversation in input."
    )


async def _in_chat(body: ResponseInput, items: Sequence[KeptItem]) -> ChatRequest:
    def say() -> ChatRequest:
        return chat_request(chat_fields(body, items))

    return say() if len(items) < _MANY else await asyncio.to_thread(say)


def picture_urls(items: Iterable[KeptItem]) -> Iterator[str]:
    """Where the pictures of messages are."""
    messages = (item for item in items if isinstance(item, MessageItem))
    pictures = (picture for message in messages for picture in message.pictures)
    return (picture.image_url for picture in pictures if picture.image_url is not None)


def sent_pictures(items: Iterable[KeptItem], request: Request) -> dict[str, Fetched]:
    """The pictures that were in the body itself, by what stands for them there."""
    urls = data_urls(request)
    return {url: file for url in picture_urls(items) if (file := urls.find(url)) is not None}


def _parsed(bodies: Iterable[bytes]) -> list[KeptItem]:
    return [KEPT_ITEM.validate_json(body) for body in bodies]


def _lines(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(event.model_dump_json(exclude_unset=True).encode() + b"\n" for event in events)

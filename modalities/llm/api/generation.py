"""From a validated request to its deltas: what every route that generates text shares.

Owns the order of the steps (a prompt of a conversation, the form of its answers, sampling), the
counts and times of what is generated, and the log of texts where the operator wants it. What the
answers look like is a route's own business: another API than OpenAI's makes a `ChatRequest` of its
body with `chat_request` and dresses the same deltas.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ContextLengthExceeded, UnsupportedOption
from triptych.core.http.body import note_ignored
from triptych.core.http.context import Context
from triptych.core.http.data_urls import data_urls
from triptych.core.http.files.reading import StoredFiles
from triptych.core.media.fetch import Fetched
from triptych.core.process.logs import fields
from triptych.core.text.threads import on_text_thread_if_long
from triptych.modalities.llm.api.messages import ImageFilePart, Message
from triptych.modalities.llm.api.protocol import ChatRequest, CompletionRequest, SamplingFields
from triptych.modalities.llm.api.replies import UsageTotals
from triptych.modalities.llm.api.samples import SampleDelta, TextCall
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.schema import ToolSet
from triptych.modalities.modality import FindLink

Fields = list[dict[str, Any]]
_logger = logging.getLogger(__name__)


def chat_request(given: Mapping[str, Any]) -> ChatRequest:
    """The chat request of these fields. Raises `RequestValidationError`, as for a body."""
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(
            [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        ) from error


@dataclass(frozen=True, slots=True)
class Generation:
    """A call that runs: its `deltas`, as they are made, and the token counts so far.

    Closing the deltas cancels it.
    """

    deltas: AsyncGenerator[SampleDelta, None]
    usage: UsageTotals
    num_samples: int

    async def samples(self) -> list[list[SampleDelta]]:
        """The deltas of each sample, when all are there."""
        samples: list[list[SampleDelta]] = [[] for _ in range(self.num_samples)]
        async with aclosing(self.deltas) as stream:
            async for delta in stream:
                samples[delta.index].append(delta)
        return samples


async def encode_conversation(
    service: LlmService, body: ChatRequest, request: Request, find_link: FindLink
) -> TokenRequest:
    """The conversation as its model takes it; its images' files are released."""
    urls, kept = data_urls(request), StoredFiles(request)

    def find(url: str) -> Fetched | None:
        return kept.find(url) or urls.find(url) or find_link(url, request)

    try:
        images = [part for message in body.messages for part in message.images]
        for part in images:
            if isinstance(part, ImageFilePart):
                await kept.read(part.url, part.image_file.file_id)
        files = {part.url: find(part.url) for part in images}
        messages, tools = await for_template(request, body.messages, body.tool_set, files)
        tenant = Context.of(request).principal.tenant
        return await service.encode_chat(
            body.model, messages, tools=tools, tenant=tenant, **body.template_options()
        )
    finally:
        urls.close()
        kept.close()


async def for_template(
    request: Request,
    messages: Sequence[Message],
    tool_set: ToolSet,
    files: Mapping[str, Fetched | None] = MappingProxyType({}),
) -> tuple[Fields, Fields]:
    """Messages, with the `files` in their URLs, and tools of a request as encoders take them."""

    def work() -> tuple[Fields, Fields]:
        return [message.for_template(files.get) for message in messages], tool_set.for_template()

    return await on_text_thread_if_long(len(await request.body()), work)


def note_reasoning(request: Request, model: TextModel, names: Iterable[str]) -> None:
    """Name the fields that ask for reasoning as ignored, where the model has none."""
    if not model.answers.has_reasoning:
        note_ignored(request, *names)


def fitted(
    service: LlmService,
    body: ChatRequest,
    prompt: TokenRequest,
    *,
    most: int | None,
    length: int | None = None,
) -> ChatRequest:
    """`body` for at most so many tokens as the context, or `length` of it, has room for.

    Other APIs than OpenAI's do not refuse a `most` that does not fit behind the prompt. Raises
    `ContextLengthExceeded` where that leaves no room.
    """
    own_length = service.model(body.model).context_length
    length = min(length or own_length, own_length)
    num_tokens = len(prompt.prompt_ids)
    if num_tokens >= length:
        raise ContextLengthExceeded(
            f"{num_tokens} tokens of prompt leave no room in a context of {length}: shorten it."
        )
    room = length - num_tokens
    return body.model_copy(update={"max_tokens": room if most is None else min(most, room)})


async def begin(
    service: LlmService, body: SamplingFields, context: Context, prompts: Sequence[TokenRequest]
) -> Generation:
    """Answer `prompts` as `body` asks. Raises what is wrong with it before anything runs."""
    tool_set, form = None, body.constraint()
    if isinstance(body, ChatRequest):
        tool_set = body.tool_set
        prompts = await service.calling(
            body.model, prompts, tool_set, form, body.max_reasoning_tokens
        )
    else:
        prompts = await service.constrained(body.model, prompts, form)
    requests = service.sampled(
        body.model,
        prompts,
        body.sampling(),
        ignore_eos=bool(body.ignore_eos),
        default_tokens=body.default_tokens,
        priority=body.priority or 0,
    )
    call = TextCall(
        model=body.model,
        num_samples=body.n or 1,
        seed=body.seed,
        stop=body.stops,
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        has_answer=body.has_answer,
        shows_special=body.skip_special_tokens is False,
        shows_stop=bool(body.include_stop_str_in_output),
        scores_all=bool(body.return_token_ids),
        tool_set=tool_set,
        has_form=form is not None,
        caller=context.caller,
    )
    _check_contents(body, requests)
    usage = UsageTotals(call.num_samples)
    deltas = _observed(service.generate(call, requests), body, context, usage)
    return Generation(deltas, usage, len(prompts) * call.num_samples)


def _check_contents(body: SamplingFields, requests: Sequence[TokenRequest]) -> None:
    """Positions that images fill have no token ids that a caller could know."""
    if body.return_token_ids and any(request.contents for request in requests):
        raise UnsupportedOption(
            "return_token_ids is not offered with images: leave it out.", param="return_token_ids"
        )


async def _observed(
    deltas: AsyncGenerator[SampleDelta, None],
    body: SamplingFields,
    context: Context,
    usage: UsageTotals,
) -> AsyncGenerator[SampleDelta, None]:
    """Pass deltas through; count and time them, and log texts where the operator wants it."""
    clock = context.metrics.token_clock(body.model, context.arrived_s)
    texts: defaultdict[int, str] = defaultdict(str)
    is_logged = context.options.log_prompts
    if is_logged:
        _log_text("prompt", context, body.model_dump(include={"messages", "prompt"}).values())
    async with aclosing(deltas) as stream:
        async for delta in stream:
            usage.add(delta)
            clock.tick(delta.index, len(delta.token_ids))
            if is_logged:
                texts[delta.index] += delta.text
            yield delta
    if is_logged:
        _log_text("answer", context, texts.values())


def _log_text(kind: str, context: Context, texts: Iterable[object]) -> None:
    ids = {"request_id": context.request_id, "call_id": context.call_id}
    _logger.info(kind, extra=fields(**ids, text=list(texts)))

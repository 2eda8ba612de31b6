"""From a validated request to its deltas, for every route that generates text.

Owns the steps from a body to the service's calls, the counts and times of generated tokens, and the
log of texts where the operator enables it. The form of the answers belongs to the routes: other
APIs than OpenAI's make a `ChatRequest` of their body with `chat_request` and format the same
deltas.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import UnsupportedOption
from triptych.core.http.body import note_ignored
from triptych.core.http.context import Context
from triptych.core.http.data_urls import data_urls
from triptych.core.http.files.reading import StoredFiles
from triptych.core.http.request_log import answer_chars
from triptych.core.media.fetch import Fetched
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields
from triptych.core.text.threads import on_text_thread_if_long
from triptych.modalities.llm.api.messages import ImageFilePart, Message
from triptych.modalities.llm.api.protocol import (
    ChatRequest,
    CompletionRequest,
    TextRequest,
    UsageOption,
)
from triptych.modalities.llm.api.replies import UsageTotals
from triptych.modalities.llm.api.samples import SampleDelta, TextCall
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.schema import ToolSet
from triptych.modalities.modality import FindLink

Fields = list[dict[str, Any]]
_logger = logging.getLogger(__name__)
TextRequestT = TypeVar("TextRequestT", bound=TextRequest)


def chat_request(given: Mapping[str, Any]) -> ChatRequest:
    """The chat request with these fields. Raises `RequestValidationError`, as for a body."""
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(
            [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        ) from error


@dataclass(frozen=True, slots=True)
class Generation:
    """A running call: its `deltas` as they are made, and the token counts so far.

    Closing `deltas` cancels the call.
    """

    deltas: AsyncGenerator[SampleDelta, None]
    usage: UsageTotals
    num_samples: int

    async def samples(self) -> list[list[SampleDelta]]:
        """Collect the deltas of each sample until the call ends."""
        samples: list[list[SampleDelta]] = [[] for _ in range(self.num_samples)]
        async with aclosing(self.deltas) as stream:
            async for delta in stream:
                samples[delta.index].append(delta)
        return samples


async def encode_conversation(
    service: LlmService, body: ChatRequest, request: Request, find_link: FindLink
) -> TokenRequest:
    """The prompt of a conversation. Releases the image files of the request."""
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
    """The messages, with `files` by their URLs, and the tools of a request, for prompt encoders."""

    def work() -> tuple[Fields, Fields]:
        return [message.for_template(files.get) for message in messages], tool_set.for_template()

    return await on_text_thread_if_long(len(await request.body()), work)


def note_reasoning(request: Request, model: TextModel, names: Iterable[str]) -> None:
    """Report the fields `names`, which ask for reasoning, as ignored if the model has none."""
    if not model.answers.has_reasoning:
        note_ignored(request, *names)


def ending_gap(body: TextRequestT, model: TextModel) -> TextRequestT:
    """`body` for a prompt that fills a gap: the tokens after a filled one end the answer."""
    assert model.gap is not None, "the prompt was made with it"
    return body.model_copy(update={"stop_token_ids": model.gap.ending(body.stop_token_ids)})


def with_usage(body: TextRequestT, options: ServerOptions) -> TextRequestT:
    """`body` with a chunk of token counts at the end of its stream, if the operator wants it."""
    if not options.enable_force_include_usage:
        return body
    return body.model_copy(update={"usage": UsageOption(include=True)})


async def begin(
    service: LlmService,
    body: TextRequest,
    context: Context,
    prompts: Sequence[TokenRequest],
    *,
    context_length: int | None = None,
) -> Generation:
    """Answer `prompts` with the settings of `body`. Raises its errors before anything runs.

    With a `context_length`, answers end where it does (see `TextCall`).
    """
    context.record.model = body.model
    _check_contents(body, prompts)
    chat = body if isinstance(body, ChatRequest) else None
    may_reason = chat is not None and service.model(body.model).answers.has_reasoning
    call = TextCall(
        model=body.model,
        adapter=body.lora_path or "",
        n=body.n or 1,
        seed=body.seed,
        sampling=body.sampling(),
        default_tokens=None if may_reason else body.default_tokens,
        context_length=context_length,
        ignore_eos=bool(body.ignore_eos),
        stop=body.stops,
        priority=service.urgency(body.priority, is_of_batch=context.is_of_batch),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        has_answer=body.has_answer,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        scores_all=bool(body.return_token_ids),
        tool_set=None if chat is None else chat.tool_set,
        form=body.constraint(),
        max_reasoning_tokens=None if chat is None else chat.max_reasoning_tokens,
        caller=context.caller,
    )
    requests = await service.prepare(call, prompts)
    usage = UsageTotals(call.n)
    deltas = _observe(service.generate(call, requests), body, context, usage)
    return Generation(deltas, usage, len(requests))


def _check_contents(body: TextRequest, prompts: Sequence[TokenRequest]) -> None:
    """Refuse `return_token_ids` with images: their positions have no token ids."""
    if body.return_token_ids and any(prompt.contents for prompt in prompts):
        raise UnsupportedOption(
            "return_token_ids is not offered with images: leave it out.", param="return_token_ids"
        )


async def _observe(
    deltas: AsyncGenerator[SampleDelta, None],
    body: TextRequest,
    context: Context,
    usage: UsageTotals,
) -> AsyncGenerator[SampleDelta, None]:
    """Pass deltas through; count and time them, and log texts where the operator enables it."""
    clock = context.metrics.token_clock(body.model, context.arrived_s)
    texts: defaultdict[int, str] = defaultdict(str)
    most = answer_chars(context.options)
    if context.options.log_prompts:
        _log_text("prompt", context, body.model_dump(include={"messages", "prompt"}).values())
    try:
        async with aclosing(deltas) as stream:
            async for delta in stream:
                usage.add(delta)
                clock.tick(delta.index, len(delta.token_ids))
                if most != 0:
                    texts[delta.index] += delta.text
                yield delta
    finally:  # also for a client that left
        total = usage.total()
        if total.prompt_tokens:  # it was admitted; sound has tokens in the usage alone
            context.record.prompt_tokens = total.prompt_tokens - usage.num_heard_tokens
            context.record.completion_tokens = total.completion_tokens - usage.num_spoken_tokens
    if most != 0:
        _log_text("answer", context, [text[:most] for text in texts.values()])


def _log_text(kind: str, context: Context, texts: Iterable[object]) -> None:
    _logger.info(kind, extra=fields(**context.log_ids, text=list(texts)))

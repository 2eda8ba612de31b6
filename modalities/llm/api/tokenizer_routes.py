"""Routes about a model's tokenizer and chat template, which generate nothing.

Owns the routes of vLLM (tokenize, detokenize, tokenizer_info), also under SGLang's paths, and of
llama.cpp (apply-template, and its fields of the other routes). A request without a model is about
the first text model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from triptych.core.errors import InvalidRequest, NotFound
from triptych.core.http.json_writer import write_json
from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.text.threads import on_text_thread_if_long
from triptych.modalities.llm.api.generation import for_template
from triptych.modalities.llm.api.multimodal import images_of
from triptych.modalities.llm.api.protocol import CompletionRequest
from triptych.modalities.llm.api.replies import DecodedText, Prompt, TokenPiece, Tokens
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tokenizer_protocol import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)


def add_tokenizer(router: APIRouter, service: LlmService, *, has_info: bool) -> None:
    """Add the tokenizer routes of `service`; with `has_info` also `/tokenizer_info`."""

    @router.post("/tokenize", response_model=Tokens)
    @router.post("/v1/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a text or of a rendered conversation."""
        model = service.model(body.model or service.default_model)
        if body.messages is None:
            ids = await encode_prompt(service, body, body.prompt or body.content or "")
        else:
            messages, tools = await for_template(request, body.messages, body.tool_set)
            options = body.template_options()
            prompt = await service.encode_chat(model.name, messages, tools=tools, **options)
            ids = prompt.prompt_ids
        document = await on_text_thread_if_long(len(ids), _tokens, model, ids, body)
        return Response(document, media_type="application/json")

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DecodedText:
        """Text of token ids."""
        skips = body.skip_special_tokens is not False
        name = body.model or service.default_model
        text = await service.decode(name, body.tokens, skip_special_tokens=skips)
        return DecodedText(prompt=text, content=text)

    @router.post("/apply-template")
    async def apply_template(body: TemplateRequest, request: Request) -> Prompt:
        """A conversation rendered by the model's chat template."""
        messages, tools = await for_template(request, body.messages, body.tool_set)
        if images_of(messages):
            raise InvalidRequest("An image cannot be written as text.", param="messages")
        prompt = await service.render_chat(
            body.model or service.default_model, messages, tools=tools, **body.template_options()
        )
        return Prompt(prompt=prompt)

    @router.get("/tokenizer_info")
    async def tokenizer_info(
        model: Annotated[str, Query(max_length=MAX_NAME_CHARS)] = "",
    ) -> dict[str, Any]:
        """The content of a model's tokenizer_config.json, and its chat template."""
        if not has_info:
            raise NotFound("Not shown here: start with --enable-tokenizer-info-endpoint.")
        return dict(service.model(model or service.default_model).tokenizer_info)


def _tokens(model: TextModel, ids: Sequence[int], body: TokenizeRequest) -> bytes:
    length = model.context_length
    reply = Tokens(tokens=list(ids), count=len(ids), max_model_len=length, token_strs=None)
    if body.return_token_strs:
        reply.token_strs = [model.token_bytes(one).decode(errors="replace") for one in ids]
    if body.with_pieces:
        reply.tokens = [TokenPiece(id=one, piece=_piece(model.token_bytes(one))) for one in ids]
    return write_json(reply)


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def encode_prompt(
    service: LlmService,
    body: CompletionRequest | TokenizeRequest,
    text: str,
    *,
    may_exceed: bool = False,
) -> tuple[int, ...]:
    """Token ids of a text, with the options of `body`."""
    return await service.encode_text(
        body.model or service.default_model,
        text,
        **body.encoding_options,
        may_exceed=may_exceed,
    )

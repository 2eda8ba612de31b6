"""Routes about cached prompts, which compute nothing.

Owns keeping and dropping the pages of a conversation, which its own key may do, and dropping all
pages, which takes an admin key (the routes of vLLM and SGLang). Pages of other keys have other
names, so no request can reach them.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel

from triptych.core.engine_api.tokens import CacheAction, TokenDelta, TokenRequest
from triptych.core.errors import AdminKeyRequired
from triptych.core.http.context import Context
from triptych.modalities.llm.api.adapters import fields_of
from triptych.modalities.llm.api.generation import for_template
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.tokenizer_protocol import TokenizeRequest
from triptych.modalities.llm.api.tokenizer_routes import encode_prompt


class CachedPrompt(BaseModel):
    """A prompt's tokens, and how many of its first ones were kept, given up or dropped."""

    model: str
    prompt_tokens: int
    cached_tokens: int


class ClearedCaches(BaseModel):
    """The tokens of each loaded model's cache on the device that were dropped."""

    cached_tokens: dict[str, int]


def add_cache(router: APIRouter, service: LlmService) -> None:
    """Add the routes about cached prompts."""

    async def act(body: TokenizeRequest, request: Request, action: CacheAction) -> CachedPrompt:
        model = service.model(body.model or service.default_model).name
        prompt = await _prompt(service, model, body, request)
        adapter = service.adapter(body.model or "")
        prompt = msgspec.structs.replace(prompt, **fields_of(adapter))
        delta = await _run(service, model, prompt, action, Context.of(request).call_id)
        return CachedPrompt(
            model=model,
            prompt_tokens=len(prompt.prompt_ids),
            cached_tokens=delta.num_cached_tokens,
        )

    @router.post("/v1/cache/pin")
    async def pin(body: TokenizeRequest, request: Request) -> CachedPrompt:
        """Keep the cached pages of a prompt in lower tiers until they are unpinned or dropped."""
        return await act(body, request, "pin")

    @router.post("/v1/cache/unpin")
    async def unpin(body: TokenizeRequest, request: Request) -> CachedPrompt:
        """Let the pages of a prompt give way to others again."""
        return await act(body, request, "unpin")

    @router.post("/v1/cache/drop")
    async def drop(body: TokenizeRequest, request: Request) -> CachedPrompt:
        """Remove the pages of a prompt from the device and all tiers."""
        return await act(body, request, "drop")

    @router.post("/reset_prefix_cache")
    @router.post("/flush_cache")
    async def clear(request: Request) -> ClearedCaches:
        """Remove all cached pages of loaded models. With API keys, an admin key is needed."""
        context = Context.of(request)
        if not context.principal.is_admin:
            raise AdminKeyRequired("Only keys of --admin-key may drop the caches of all.")
        ready = {each.model for each in service.client.status().models if each.state == "ready"}
        names, nothing = sorted(ready & service.models.keys()), TokenRequest(prompt_ids=(0,))
        deltas = await asyncio.gather(
            *(_run(service, name, nothing, "clear", context.call_id) for name in names)
        )
        dropped = (delta.num_cached_tokens for delta in deltas)
        return ClearedCaches(cached_tokens=dict(zip(names, dropped, strict=True)))


async def _prompt(
    service: LlmService, model: str, body: TokenizeRequest, request: Request
) -> TokenRequest:
    """The prompt that a body names, for its sender's key."""
    tenant = Context.of(request).principal.tenant
    if body.messages is None:
        ids = await encode_prompt(service, body, body.prompt or body.content or "")
        return TokenRequest(prompt_ids=ids, tenant=tenant)
    messages, tools = await for_template(request, body.messages, body.tool_set)
    return await service.encode_chat(
        model, messages, tools=tools, tenant=tenant, **body.template_options()
    )


async def _run(
    service: LlmService, model: str, prompt: TokenRequest, action: CacheAction, call_id: str
) -> TokenDelta:
    """The only delta of a request that computes nothing."""
    asked = msgspec.structs.replace(prompt, cache_action=action)
    stream = service.client.submit(model, asked, job_id=f"{call_id}-{action}-{model}")
    (delta,) = [output.payload async for output in stream if output.is_final]
    assert isinstance(delta, TokenDelta), "an error would have been raised"
    return delta

"""llama.cpp's `/infill`: the text between two others, for editors.

Owns the route and the form of its answers. `infill` has the prompts of the families; `generation`
runs them, as for `/v1/completions` with a suffix.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.http.context import Context
from triptych.core.http.json_writer import write_json
from triptych.core.http.sse import EventStream, described
from triptych.modalities.llm.api.generation import Generation, begin, ending_gap
from triptych.modalities.llm.api.infill_protocol import (
    InfillChunk,
    InfillReply,
    InfillRequest,
    Timings,
)
from triptych.modalities.llm.api.samples import SampleDelta
from triptych.modalities.llm.api.service import LlmService

_DEFAULT_FILENAME = "tmp"  # llama.cpp's


def add_infill(router: APIRouter, service: LlmService) -> None:
    """Add the route in front of `service`."""

    @router.post(
        "/infill",
        response_model=None,
        responses={
            200: {
                "model": InfillReply,
                "content": described(InfillChunk),
                "description": "The answer.",
            }
        },
    )
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Write the text between two others, in a project's further texts."""
        context = Context.of(request)
        extra = [(each.filename or _DEFAULT_FILENAME, each.text) for each in body.input_extra]
        ids = await service.encode_gap(
            body.model,
            body.input_prefix + body.prompt,
            body.input_suffix,
            extra=extra,
            num_answer=body.sampling()["max_tokens"],
        )
        prompt = TokenRequest(prompt_ids=ids, tenant=context.principal.tenant)
        body = ending_gap(body, service.model(body.model))
        generation = await begin(service, body, context, [prompt])
        documents = _documents(_InfillAnswer(body, len(ids)), generation)
        if body.stream:
            return EventStream(documents, heartbeat_s=context.options.heartbeat_s, end=b"")
        async with aclosing(documents):
            whole = [document async for document in documents][-1]
        return Response(write_json(whole), media_type="application/json")


class _InfillAnswer:
    """The answer so far, and when its parts came."""

    def __init__(self, body: InfillRequest, num_prompt_tokens: int) -> None:
        self._body = body
        self._num_prompt_tokens = num_prompt_tokens
        self._began_s = time.monotonic()
        self._first_s = self._began_s
        self._text = ""
        self._token_ids: list[int] = []

    def chunk(self, delta: SampleDelta) -> InfillChunk:
        """Add a delta, and return its part of a stream."""
        if not self._token_ids:
            self._first_s = time.monotonic()
        is_shown = self._body.has_answer
        self._text += delta.text if is_shown else ""
        self._token_ids += delta.sampled_ids
        return InfillChunk(
            index=0,
            stop=False,
            content=delta.text if is_shown else "",
            tokens=list(delta.token_ids) if is_shown and self._body.return_tokens else [],
            tokens_predicted=len(self._token_ids),
            tokens_evaluated=self._num_prompt_tokens,
        )

    def reply(self, last: SampleDelta) -> InfillReply:
        """The whole answer; in a stream its text was sent before."""
        is_shown, is_whole = self._body.has_answer, not self._body.stream
        word = last.stop_reason if isinstance(last.stop_reason, str) else ""
        kind: Literal["eos", "limit", "word"] = "word" if word else "eos"
        num_predicted = len(self._token_ids) if is_shown else 0
        shown_ids = self._token_ids if is_whole and is_shown and self._body.return_tokens else []
        return InfillReply(
            index=0,
            stop=True,
            truncated=False,
            content=self._text if is_whole else "",
            tokens=shown_ids,
            model=self._body.model,
            tokens_predicted=num_predicted,
            tokens_evaluated=self._num_prompt_tokens,
            tokens_cached=last.num_cached_tokens,
            has_new_line="\n" in self._text,
            stop_type="limit" if last.finish_reason == "length" else kind,
            stopping_word=word,
            timings=self._timings(num_predicted),
        )

    def _timings(self, num_predicted: int) -> Timings:
        prompt_s = self._first_s - self._began_s
        predicted_s = time.monotonic() - self._first_s
        return Timings(
            prompt_n=self._num_prompt_tokens,
            prompt_ms=prompt_s * 1000,
            prompt_per_second=self._num_prompt_tokens / max(prompt_s, 1e-6),
            predicted_n=num_predicted,
            predicted_ms=predicted_s * 1000,
            predicted_per_second=num_predicted / max(predicted_s, 1e-6),
        )


async def _documents(
    answer: _InfillAnswer, generation: Generation
) -> AsyncGenerator[BaseModel, None]:
    async with aclosing(generation.deltas) as stream:
        async for delta in stream:
            chunk = answer.chunk(delta)
            if delta.finish_reason is None:
                yield chunk
                continue
            if chunk.content:
                yield chunk
            yield answer.reply(delta)

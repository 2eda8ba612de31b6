"""Text in, text out: what HTTP routes and the Python pipeline share.

Owns the way of a call from messages to a stream of text: prompts, checks, admission, one engine job
per sample. What a job's tokens come to is `samples`'. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Self

import msgspec

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError
from triptych.core.grammar.constraint import Constraint
from triptych.core.limits import MAX_HELD_IMAGE_BYTES
from triptych.core.options.config import Config
from triptych.core.text.threads import on_text_thread
from triptych.modalities.llm.api.checks import check_call, check_request, sampling_params
from triptych.modalities.llm.api.multimodal import Message, PromptEncoder, images_of, words_of
from triptych.modalities.llm.api.samples import SampleDelta, SampleText, TextCall
from triptych.modalities.llm.api.text import TextModel, text_size
from triptych.modalities.llm.api.tools.faults import blamed
from triptych.modalities.llm.api.tools.prompt import in_words
from triptych.modalities.llm.api.tools.schema import ToolSet
from triptych.modalities.service import HoldLimit, ModelService, default_seed, merge
from triptych.schedulers.admission import Admission


class LlmService(ModelService[TextModel]):
    """Serves text generation from an engine client. `encoders` make prompts for vision models."""

    def __init__(
        self,
        client: EngineClient,
        models: Sequence[TextModel],
        admission: Admission,
        *,
        encoders: Mapping[str, PromptEncoder] = MappingProxyType({}),
        default_seed: int | None = None,
    ) -> None:
        super().__init__(client, models, admission, default_seed=default_seed)
        self._encoders = encoders
        self._images = HoldLimit("Too many images are being looked at; try later.")

    @classmethod
    def from_config(
        cls,
        config: Config,
        models: Sequence[TextModel],
        client: EngineClient,
        *,
        encoders: Mapping[str, PromptEncoder] = MappingProxyType({}),
        admission: Admission | None = None,
    ) -> Self:
        """The service, started, with the bounds and the seed of a configuration."""
        admission = admission or Admission(options=config.schedule)
        service = cls(
            client, models, admission, encoders=encoders, default_seed=default_seed(config)
        )
        service.start()
        return service

    def start(self) -> None:
        """Begin what the first conversations would otherwise wait for."""
        for model in self.models.values():
            model.start()

    async def close(self) -> None:
        """End the processes that run chat templates."""
        for model in self.models.values():
            await model.close()

    def sees(self, model: str) -> bool:
        """Whether `model` takes images."""
        return self.model(model).name in self._encoders

    async def encode_chat(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tenant: str = "",
        **template_kwargs: Any,
    ) -> TokenRequest:
        """A conversation as `model` takes it; `sampled` makes a request of it.

        A model whose chat template knows no `tools` is told of them in words.
        """
        text = self.model(model)
        encoder: PromptEncoder = text
        if not text.answers.template_supports_tools:
            messages, tools = await _told(messages, tools), ()
        if self.sees(model):
            encoder = self._encoders[text.name]
        elif images_of(messages):
            seeing = ", ".join(self._encoders) or "none; `--model triptych-vision` is one"
            raise InvalidRequest(
                f"{model} reads text alone. Models here that see images: {seeing}.",
                param="messages",
            )
        return await encoder.encode_messages(
            messages, tools=tools, tenant=tenant, **template_kwargs
        )

    @property
    def first(self) -> str:
        """The model for those who name none; no name where there is no model."""
        return next(iter(self.models), "")

    async def render_chat(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **template_kwargs: Any,
    ) -> str:
        """A conversation without images as `model` reads it."""
        text = self.model(model)
        if not text.answers.template_supports_tools:
            messages, tools = await _told(messages, tools), ()
        plain = [{**each, "content": words_of(each.get("content"))} for each in messages]
        return await text.render(plain, tools=tools, **template_kwargs)

    async def encode_text(self, model: str, text: str, **reading: bool) -> tuple[int, ...]:
        """Token ids of plain text; `reading` is what `TextModel.encode_text` takes."""
        return await on_text_thread(len(text), self.model(model).encode_text, text, **reading)

    async def decode(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Text of token ids."""
        decode = self.model(model).decode
        return await on_text_thread(
            len(token_ids), decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    async def constrained(
        self, model: str, prompts: Sequence[TokenRequest], constraint: Constraint | None
    ) -> Sequence[TokenRequest]:
        """`prompts` with a form for their answers. Raises what `GrammarChecker.check` raises."""
        if constraint is None:
            return prompts
        grammar = await self.model(model).grammars.check(constraint)
        return [msgspec.structs.replace(prompt, grammar=grammar) for prompt in prompts]

    async def calling(
        self,
        model: str,
        prompts: Sequence[TokenRequest],
        tool_set: ToolSet,
        form: Constraint | None = None,
        max_reasoning_tokens: int | None = None,
    ) -> Sequence[TokenRequest]:
        """`prompts` with a form for what is not reasoning, and for calls, as `constrained` does it.

        Reasoning ends after `max_reasoning_tokens`, if they are bounded.
        """
        text = self.model(model)
        size = text_size(list(tool_set.schemas.values()))
        requests: list[TokenRequest] = []
        for prompt in prompts:
            ids = prompt.prompt_ids
            try:
                constraint = await on_text_thread(size, text.answer_constraint, ids, tool_set, form)
                (request,) = await self.constrained(model, [prompt], constraint)
            except RequestError as error:
                raise await blamed(error, tool_set, text.grammars.check) from error
            rules = text.reasoning_rules(ids, max_reasoning_tokens, has_form=constraint is not None)
            requests.append(msgspec.structs.replace(request, reasoning=rules))
        return requests

    def sampled(
        self,
        model: str,
        prompts: Sequence[TokenRequest],
        given: Mapping[str, Any],
        *,
        ignore_eos: bool = False,
        default_tokens: int | None = None,
        priority: int = 0,
    ) -> list[TokenRequest]:
        """Requests for `prompts` with the sampling parameters that a caller gave.

        Without `max_tokens` each yields as many as the longest leaves room for, at most
        `default_tokens` where there are any. Raises `InvalidRequest` as `sampling_params` does.
        """
        text = self.model(model)
        if given.get("max_tokens") is None:
            longest = max(len(prompt.prompt_ids) for prompt in prompts)
            room = max(1, text.context_length - longest)  # `generate` refuses what has none
            given = {**given, "max_tokens": min(room, default_tokens or room)}
        sampling = sampling_params(text, ignore_eos=ignore_eos, given=given)
        return [
            msgspec.structs.replace(prompt, sampling=sampling, priority=priority)
            for prompt in prompts
        ]

    def generate(
        self, call: TextCall, requests: Sequence[TokenRequest]
    ) -> AsyncGenerator[SampleDelta, None]:
        """Run a call; deltas of all samples come merged, in the order they are made.

        Closing the iterator cancels every sample. Checks the call before anything is submitted.
        """
        model = self.model(call.model)
        check_call(call.num_samples, call.stop)
        for request in requests:
            check_request(request, call.seed or 0, model)
        return self._admitted(call, requests, model)

    async def _admitted(
        self, call: TextCall, requests: Sequence[TokenRequest], model: TextModel
    ) -> AsyncGenerator[SampleDelta, None]:
        n, seed = call.num_samples, self._seed(call.seed)
        num_tokens = n * sum(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        num_bytes = n * sum(content.num_bytes for r in requests for content in r.contents)
        if num_bytes > MAX_HELD_IMAGE_BYTES:
            raise PayloadTooLarge(
                "The images are too large for so many samples: ask for fewer.", param="n"
            )
        admitted = self._admission.admit(
            key=call.caller.principal.key, num_jobs=n * len(requests), num_tokens=num_tokens
        )
        with admitted, self._images.holding(num_bytes, MAX_HELD_IMAGE_BYTES):
            samples = [
                self._sample(call, index, _nth_sample(request, seed, index % n), model)
                for index, request in enumerate(r for r in requests for _ in range(n))
            ]
            async with aclosing(merge(samples)) as merged:
                async for delta in merged:
                    yield delta

    async def _sample(
        self, call: TextCall, index: int, request: TokenRequest, model: TextModel
    ) -> AsyncGenerator[SampleDelta, None]:
        caller = call.caller
        outputs = self.client.submit(
            call.model,
            request,
            job_id=f"{caller.call_id}.{index}",
            deadline_s=caller.deadline_s,
            client=caller.client,
        )
        sample = SampleText(index, request, model, call)
        async with aclosing(outputs) as stream:
            async for output in stream:
                if isinstance(output.payload, TokenDelta):
                    delta = sample.push(output.payload)
                    yield delta
                    if delta.finish_reason is not None:
                        return


async def _told(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Message]:
    return await on_text_thread(text_size([messages, tools]), in_words, messages, tools)


def _nth_sample(request: TokenRequest, seed: int, index: int) -> TokenRequest:
    sampling = msgspec.structs.replace(request.sampling, seed=seed, sample_index=index)
    return msgspec.structs.replace(request, sampling=sampling)

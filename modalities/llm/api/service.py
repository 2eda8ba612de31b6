"""Text in, text out: the service that HTTP routes and the Python pipeline share.

Owns the steps of a call: `encode_chat` makes a prompt of messages, `prepare` makes requests of
prompts, `generate` runs them, one engine job per sample. Text is made of tokens in `samples`. Knows
nothing of HTTP or torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import msgspec
from typing_extensions import override

from triptych.core.engine_api.aliases import AliasClient
from triptych.core.engine_api.client import EngineClient, reduced_context
from triptych.core.engine_api.tokens import ReasoningRules, TokenDelta, TokenRequest
from triptych.core.errors import Draining, InvalidRequest, PayloadTooLarge, RequestError
from triptych.core.grammar.constraint import Constraint
from triptych.core.limits import MAX_HELD_IMAGE_BYTES, MAX_PRIORITY
from triptych.core.options.config import Config
from triptych.core.text.threads import on_text_thread
from triptych.modalities.llm.api.adapters import AdapterNames, NamedAdapter, fields_of
from triptych.modalities.llm.api.checks import call_sampling, check_call, check_request
from triptych.modalities.llm.api.multimodal import Message, PromptEncoder, images_of, words_of
from triptych.modalities.llm.api.samples import SampleDelta, SampleText, TextCall
from triptych.modalities.llm.api.sound import ChatSound
from triptych.modalities.llm.api.spoken_answers import SpokenAnswers
from triptych.modalities.llm.api.text import TextModel, text_size
from triptych.modalities.llm.api.tools.prompt import describe_tools
from triptych.modalities.llm.api.tools.schema import ToolSet
from triptych.modalities.service import HoldLimit, ModelService, default_seed, merge
from triptych.schedulers.admission import Admission

_SEARCH_S = 2.0
"""Limit of the search for the tool whose schema failed."""

_Check = Callable[[Constraint], Awaitable[object]]
"""Raises `RequestError` for a constraint that cannot be enforced."""
_AnswerRules = tuple[str, ReasoningRules | None]


class LlmService(ModelService[TextModel]):
    """Generates text with an engine client. `encoders` make the prompts of vision models."""

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
        self.adapters: AdapterNames | None = None
        """The adapters of its models; set before the first call, if there may be any."""
        self.sound: ChatSound | None = None
        """Hears messages and speaks answers, where the server can; set before the first call."""
        self.spoken_answers = SpokenAnswers()
        self._encoders = encoders
        self._runs_low_first = True
        self._marks_reasoning = False
        self._images = HoldLimit("Too many images are being processed; try again later.")

    @classmethod
    def from_config(
        cls,
        config: Config,
        models: Sequence[TextModel],
        client: EngineClient,
        *,
        encoders: Mapping[str, PromptEncoder] = MappingProxyType({}),
        admission: Admission | None = None,
        taken: Collection[str] = (),
    ) -> Self:
        """A started service with the limits and the seed of a configuration.

        No adapter may have one of the names `taken`, those of models of other tasks.
        """
        admission = admission or Admission(options=config.schedule)
        service = cls(
            client, models, admission, encoders=encoders, default_seed=default_seed(config)
        )
        service._marks_reasoning = config.speculation.use_relaxed_acceptance_for_thinking
        service._runs_low_first = config.schedule.schedule_low_priority_values_first
        aliases = client.aliases if isinstance(client, AliasClient) else {}
        service.adapters = AdapterNames.open(
            *(client, service.adaptable, config),
            aliases=aliases,
            seeing=encoders,
            taken={*taken, *service.models},
        )
        service.start()
        return service

    def start(self) -> None:
        """Start the template processes, so that the first conversations do not wait for them."""
        for model in self.models.values():
            model.start()

    async def close(self) -> None:
        """End the processes that run chat templates."""
        for model in self.models.values():
            await model.close()
        await super().close()

    @override
    def add(self, model: TextModel) -> None:
        super().add(model)
        model.start()
        model.warm()

    @override
    async def remove(self, name: str) -> None:
        if name in self.models:
            await self.models.pop(name).close()
        if self.adapters is not None:
            self.adapters.forget(name)

    def adaptable(self) -> list[str]:
        """The models that may have adapters."""
        return list(self.models)

    def urgency(self, priority: int | None, *, is_of_batch: bool = False) -> int:
        """The `priority` of a request as the engine takes it: higher ones run first.

        Without one, lines of a batch file run after all others.
        """
        if priority is None:
            return -MAX_PRIORITY if is_of_batch else 0
        return -priority if self._runs_low_first else priority

    @override
    def model(self, name: str) -> TextModel:
        """The model called `name`, or the one that the adapter of this name changes."""
        adapter = self.adapter(name)
        found = super().model(name if adapter is None else adapter.model)
        length = reduced_context(self.client.status(), found.name)
        if not 0 < length < found.context_length:
            return found
        self.models[found.name] = replace(found, context_length=length)
        return self.models[found.name]

    def adapter(self, name: str) -> NamedAdapter | None:
        """The adapter that is called `name`, unless a model is."""
        if self.adapters is None or self._aliases.get(name, name) in self.models:
            return None
        return self.adapters.find(name)

    def _adapter(self, call: TextCall) -> NamedAdapter | None:
        """The adapter of a call. Raises `NotFound` for a name that is none."""
        if self.adapters is None:
            return None
        if call.adapter:
            return self.adapters.of_model(call.adapter, self.model(call.model).name)
        return self.adapter(call.model)

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
        """The prompt that a conversation is for `model`, without sampling parameters.

        If the chat template has no `tools`, they are described in the prompt's text.
        """
        text = self.model(model)
        encoder: PromptEncoder = text
        if not text.answers.template_supports_tools:
            messages, tools = await _describe_tools(messages, tools), ()
        if self.sees(model):
            encoder = self._encoders[text.name]
        elif images_of(messages):
            seeing = ", ".join(self._encoders) or "none; `--model triptych-vision` is one"
            raise InvalidRequest(
                f"{model} reads text alone. Models here that see images: {seeing}.",
                param="messages",
            )
        with self._served(model):
            return await encoder.encode_messages(
                messages, tools=tools, tenant=tenant, **template_kwargs
            )

    @contextmanager
    def _served(self, model: str) -> Iterator[None]:
        """Raise `UnknownModel` if the processes of a model end because it is deleted."""
        try:
            yield
        except Draining:
            self.model(model)
            raise

    @property
    def default_model(self) -> str:
        """The model of requests that name none; empty where there is no model."""
        return next(iter(self.models), "")

    async def render_chat(
        self,
        model: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **template_kwargs: Any,
    ) -> str:
        """The rendered prompt of a conversation without images."""
        text = self.model(model)
        if not text.answers.template_supports_tools:
            messages, tools = await _describe_tools(messages, tools), ()
        plain = [{**each, "content": words_of(each.get("content"))} for each in messages]
        with self._served(model):
            return await text.render(plain, tools=tools, **template_kwargs)

    async def encode_text(self, model: str, text: str, **options: bool) -> tuple[int, ...]:
        """Token ids of plain text; `options` are those of `TextModel.encode_text`."""
        return await on_text_thread(len(text), self.model(model).encode_text, text, **options)

    async def encode_gap(
        self, model: str, before: str, after: str, **options: Any
    ) -> tuple[int, ...]:
        """Token ids of a prompt for the text between two others (`TextModel.encode_gap`)."""
        encode_gap = self.model(model).encode_gap
        size = len(before) + len(after) + sum(len(text) for _, text in options.get("extra", ()))
        return await on_text_thread(size, encode_gap, before, after, **options)

    async def decode(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Text of token ids."""
        decode = self.model(model).decode
        return await on_text_thread(
            len(token_ids), decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    async def prepare(self, call: TextCall, prompts: Sequence[TokenRequest]) -> list[TokenRequest]:
        """Requests for `prompts`, ready to run: `call.n` of each prompt, with the call's settings.

        Raises a `RequestError` for settings, grammars and lengths that the model cannot take.
        """
        model = self.model(call.model)
        adapted = fields_of(self._adapter(call))
        sampling = call_sampling(model, call, prompts)
        with self._served(call.model):
            rules = await self._answer_rules(model, call, prompts)
        check_call(call)
        sampling = msgspec.structs.replace(sampling, seed=self._seed(call.seed))
        sampling.validate(model.vocab_size)
        samplings = [msgspec.structs.replace(sampling, sample_index=at) for at in range(call.n)]
        requests: list[TokenRequest] = []
        for prompt, (grammar, reasoning) in zip(prompts, rules, strict=True):
            fields = {"grammar": grammar, "reasoning": reasoning, "priority": call.priority}
            fields |= adapted
            samples = [msgspec.structs.replace(prompt, sampling=s, **fields) for s in samplings]
            check_request(samples[0], model)
            requests += samples
        return requests

    async def _answer_rules(
        self, model: TextModel, call: TextCall, prompts: Sequence[TokenRequest]
    ) -> list[_AnswerRules]:
        """The grammar and the reasoning rules of the answers to each prompt.

        Only chat has a `tool_set`, and with it reasoning and calls. Raises as
        `GrammarChecker.check` and `TextModel.reasoning_rules` do.
        """
        if call.tool_set is None:
            grammar = "" if call.form is None else await model.grammars.check(call.form)
            return [(grammar, None)] * len(prompts)
        size = text_size(list(call.tool_set.schemas.values()))
        found: list[_AnswerRules] = []
        for prompt in prompts:
            ids, grammar = prompt.prompt_ids, ""
            try:
                constraint = await on_text_thread(
                    size, model.answer_constraint, ids, call.tool_set, call.form
                )
                if constraint is not None:
                    grammar = await model.grammars.check(constraint)
            except RequestError as error:
                raise await _name_tool(error, call.tool_set, model.grammars.check) from error
            budget, has_form = call.max_reasoning_tokens, constraint is not None
            reasoning = model.reasoning_rules(
                ids, budget, has_form=has_form, is_marked=self._marks_reasoning
            )
            found.append((grammar, reasoning))
        return found

    async def generate(
        self, call: TextCall, requests: Sequence[TokenRequest]
    ) -> AsyncGenerator[SampleDelta, None]:
        """Run the requests that `prepare` made for a call; yield deltas of all samples, merged.

        Closing the iterator cancels every sample.
        """
        model = self.model(call.model)
        num_tokens = sum(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        num_bytes = sum(content.num_bytes for r in requests for content in r.contents)
        if num_bytes > MAX_HELD_IMAGE_BYTES:
            raise PayloadTooLarge(
                "The images are too large for so many samples: ask for fewer.", param="n"
            )
        admitted = self._admission.admit(
            key=call.caller.principal.key, num_jobs=len(requests), num_tokens=num_tokens
        )
        with admitted, self._images.hold(num_bytes, MAX_HELD_IMAGE_BYTES):
            samples = [
                self._sample(call, index, request, model) for index, request in enumerate(requests)
            ]
            async with aclosing(merge(samples)) as merged:
                async for delta in merged:
                    yield delta

    async def _sample(
        self, call: TextCall, index: int, request: TokenRequest, model: TextModel
    ) -> AsyncGenerator[SampleDelta, None]:
        caller = call.caller
        outputs = self.client.submit(
            model.name,
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


async def _describe_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Message]:
    return await on_text_thread(text_size([messages, tools]), describe_tools, messages, tools)


async def _name_tool(error: RequestError, tool_set: ToolSet, check: _Check) -> RequestError:
    """The error of the tool whose schema is the cause, with its name; or `error` itself.

    The search has a time limit: a caller with many slow schemas waits for the first only.
    """
    try:
        async with asyncio.timeout(_SEARCH_S):
            for tool in tool_set.tools:
                schema = tool.function.parameters or {}
                try:
                    await check(Constraint("json_schema", json.dumps(schema), "tools"))
                except RequestError as found:
                    message = f"The parameters of tool {tool.function.name}: {found.message}"
                    return type(found)(message, param="tools")
    except TimeoutError:
        pass
    return error

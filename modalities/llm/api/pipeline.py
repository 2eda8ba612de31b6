"""Chat from Python: load a model, call it, stream it.

Owns the `ChatPipeline` object: the same engine and text service as the server, in this process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, overload

import msgspec
from pydantic import ValidationError

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import InvalidRequest, TriptychError, UnsupportedOption
from triptych.core.options.config import Config
from triptych.core.process.typed import convert
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.adapters import AdapterNames
from triptych.modalities.llm.api.constraints import ConstraintFields, constraint_of
from triptych.modalities.llm.api.multimodal import ImageSource, Message
from triptych.modalities.llm.api.samples import (
    FinishReason,
    SampleDelta,
    TextCall,
    TokenText,
    TokenUsage,
)
from triptych.modalities.llm.api.sampling_fields import stop_strings
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.pieces import Answer, ToolUse, Words
from triptych.modalities.llm.api.tools.schema import NamedTool, Tool, ToolCall, ToolSet
from triptych.modalities.llm.modality import CHAT
from triptych.modalities.modality import Modality
from triptych.modalities.pipeline import Pipeline

Conversation = str | Sequence[Message]
RawPrompt = str | Sequence[int]
"""A prompt without a chat template: a text, or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSample:
    """One finished answer: its text, the reasoning before it, and its tool calls.

    `token_ids` are those of the text, marks of reasoning and calls included.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: TokenUsage
    logprobs: tuple[TokenText, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The answer to one conversation: `n` samples, the first of which is `text`."""

    samples: tuple[ChatSample, ...]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    @property
    def tool_calls(self) -> tuple[ToolUse, ...]:
        """The first sample's calls of tools."""
        return self.samples[0].tool_calls

    @property
    def finish_reason(self) -> str:
        """Why the first sample ended: "stop", "length" or "tool_calls"."""
        return self.samples[0].finish_reason

    @property
    def usage(self) -> TokenUsage:
        """Token counts of the first sample."""
        return self.samples[0].usage

    def __str__(self) -> str:
        return self.text


class ChatPipeline(Pipeline[LlmService]):
    """A chat model in this process.

        with ChatPipeline.from_pretrained() as chat:
            print(chat("What is the capital of France?"))
            for piece in chat.stream("Tell me a story."):
                print(piece, end="", flush=True)

    A conversation is a string or a list of `{"role": ..., "content": ...}` messages; `complete`
    takes texts or token ids without a template. Keyword arguments of a call are the fields of
    `SamplingParams`, or `sampling` with all of them, defaults included; `stop`, `n`, `seed`,
    `ignore_eos`; `adapter`, the name of a LoRA adapter; `tools` and `tool_choice` as the OpenAI API
    takes them; `thinking_budget`; and the format of the answer: `response_format`,
    `structured_outputs`, or `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.
    Calls, `stream` and `complete` have async twins that may be awaited on any loop.
    """

    _modalities: ClassVar[tuple[Modality, ...]] = (CHAT,)

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], LlmService]:
        text = TextModel.open(resolved, config.models)
        return lambda client: LlmService.from_config(config, [text], client)

    @overload
    def __call__(self, conversation: Conversation, **options: Any) -> ChatAnswer: ...
    @overload
    def __call__(
        self, conversation: Sequence[Conversation], **options: Any
    ) -> list[ChatAnswer]: ...
    def __call__(self, conversation: Any, **options: Any) -> ChatAnswer | list[ChatAnswer]:
        """Answer one conversation, or a batch of them (a list of strings or of message lists)."""
        return self._loop.run(self._reply(conversation, options))

    async def acall(self, conversation: Any, **options: Any) -> ChatAnswer | list[ChatAnswer]:
        """Async twin of calling the pipeline."""
        return await self._loop.run_async(self._reply(conversation, options))

    def stream(self, conversation: Conversation, **options: Any) -> Iterator[str]:
        """Answer one conversation piece by piece. Leaving the loop early cancels the rest."""
        return self._loop.iterate(lambda: self._texts(conversation, options))

    def astream(self, conversation: Conversation, **options: Any) -> AsyncGenerator[str, None]:
        """Async twin of `stream`."""
        return self._loop.iterate_async(lambda: self._texts(conversation, options))

    @overload
    def complete(self, prompt: RawPrompt, **options: Any) -> ChatAnswer: ...
    @overload
    def complete(self, prompt: Sequence[RawPrompt], **options: Any) -> list[ChatAnswer]: ...
    def complete(self, prompt: Any, **options: Any) -> ChatAnswer | list[ChatAnswer]:
        """Continue a text or its token ids, or a batch of them, without a chat template.

        The options are those of a call, except tools and `thinking_budget`.
        """
        return self._loop.run(self._completions(prompt, options))

    async def acomplete(self, prompt: Any, **options: Any) -> ChatAnswer | list[ChatAnswer]:
        """Async twin of `complete`."""
        return await self._loop.run_async(self._completions(prompt, options))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text."""
        return self._loop.run(
            self._service.encode_text(self._model, text, add_special_tokens=add_special_tokens)
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._loop.run(
            self._service.decode(self._model, token_ids, skip_special_tokens=skip_special_tokens)
        )

    def render(self, conversation: Conversation, **template_options: Any) -> str:
        """The prompt that the model's chat template makes of a conversation without images."""
        messages = self._messages(conversation)
        return self._loop.run(self._service.render_chat(self._model, messages, **template_options))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that a call may name as `adapter`."""
        return tuple(each.name for each in self._service.adapters or ())

    def load_lora_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load the LoRA adapter at `path`, a file, folder or hub id, under a name of its own.

        With `replace` it takes the place of one with this name. Raises `RequestError` for a name
        that is taken, and for an adapter that is not there or does not fit the model.
        """
        names = self._adapter_names()
        self._loop.run(names.load(name, str(path), base_model=self._model, replaces=replace))

    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter, once the calls that use it have ended. Raises `RequestError`."""
        self._loop.run(self._adapter_names().unload(name))

    def _adapter_names(self) -> AdapterNames:
        if self._service.adapters is None:
            raise UnsupportedOption(f"{self.name} takes no adapters.")
        return self._service.adapters

    def map(
        self, entries: Sequence[Mapping[str, Any]], *, num_in_flight: int = 64, **options: Any
    ) -> Iterator[ChatAnswer | TriptychError]:
        """Answer many entries, results in order, `num_in_flight` at a time.

        An entry holds `prompt` or `messages`; its other fields are call options that override
        `options`; a `model` must be this one. An entry that cannot be answered yields its error
        and the other entries are answered.
        """

        async def answer(entry: Mapping[str, Any]) -> ChatAnswer:
            self._check_model(entry.get("model"))
            own = {k: v for k, v in entry.items() if k not in ("prompt", "messages", "model")}
            conversation = entry.get("messages", entry.get("prompt"))
            reply = await self._reply(conversation, {**options, **own})
            if not isinstance(reply, ChatAnswer):
                raise InvalidRequest("An entry holds one conversation.", param="messages")
            return reply

        most = min(num_in_flight, self._num_at_once(options))
        return self._map_entries(answer, entries, most)

    async def _reply(
        self, conversation: Any, options: Mapping[str, Any]
    ) -> ChatAnswer | list[ChatAnswer]:
        conversations = _as_batch(conversation)
        if conversations is None:
            return (await self._replies([conversation], options))[0]
        size = self._num_at_once(options)
        parts = [conversations[at : at + size] for at in range(0, len(conversations), size)]
        return [reply for part in parts for reply in await self._replies(part, options)]

    def _num_at_once(self, options: Mapping[str, Any]) -> int:
        """How many conversations are submitted together."""
        return max(1, self._service.max_jobs // _call_options(options).n)

    async def _replies(
        self, conversations: Sequence[Conversation], options: Mapping[str, Any]
    ) -> list[ChatAnswer]:
        return await self._answers(*await self._prepare(conversations, options))

    async def _completions(
        self, prompt: Any, options: Mapping[str, Any]
    ) -> ChatAnswer | list[ChatAnswer]:
        prompts, is_batch = _raw_prompts(prompt)
        call = self._call(_call_options(options), options)
        if options.get("tools") or call.max_reasoning_tokens is not None:
            raise InvalidRequest("tools and thinking_budget are for conversations.", param="tools")
        ids = [
            await self._service.encode_text(self._model, each) if isinstance(each, str) else each
            for each in prompts
        ]
        requests = [TokenRequest(prompt_ids=tuple(each)) for each in ids]
        call, size = replace(call, tool_set=None), self._num_at_once(options)
        parts = [requests[at : at + size] for at in range(0, len(requests), size)]
        answers = [
            answer
            for part in parts
            for answer in await self._answers(call, await self._service.prepare(call, part))
        ]
        return answers if is_batch else answers[0]

    async def _answers(self, call: TextCall, requests: Sequence[TokenRequest]) -> list[ChatAnswer]:
        """The answers to the prompts of a call, whose requests are `call.n` of each."""
        n = call.n
        deltas: list[list[SampleDelta]] = [[] for _ in requests]
        async for delta in self._service.generate(call, requests):
            deltas[delta.index].append(delta)
        samples = tuple(map(_sample, deltas))
        return [ChatAnswer(samples=samples[at : at + n]) for at in range(0, len(samples), n)]

    async def _texts(
        self, conversation: Conversation, options: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        if options.get("n", 1) != 1:
            raise InvalidRequest("stream gives one sample: call it with n=1.", param="n")
        call, requests = await self._prepare([conversation], options)
        async with aclosing(self._service.generate(call, requests)) as deltas:
            async for delta in deltas:
                for piece in delta.shown:
                    if isinstance(piece, Words):
                        yield piece.text

    async def _prepare(
        self, conversations: Sequence[Conversation], options: Mapping[str, Any]
    ) -> tuple[TextCall, Sequence[TokenRequest]]:
        """The settings of a call, and its requests."""
        call = self._call(_call_options(options), options)
        assert call.tool_set is not None, "a conversation has a tool set, even an empty one"
        described = call.tool_set.for_template()
        prompts = [
            await self._service.encode_chat(
                self._model, self._messages(conversation), tools=described
            )
            for conversation in conversations
        ]
        return call, await self._service.prepare(call, prompts)

    def _call(self, own: _CallOptions, options: Mapping[str, Any]) -> TextCall:
        """The settings of a call of a conversation."""
        taken = {*own.__struct_fields__, *ConstraintFields.model_fields}
        given = {k: v for k, v in options.items() if k not in taken}
        return TextCall(
            model=self._model,
            adapter=own.adapter,
            n=own.n,
            seed=own.sampling.seed if own.sampling and own.seed is None else own.seed,
            sampling={"max_tokens": None, **own.sampling_fields(), **given},
            ignore_eos=own.ignore_eos,
            stop=stop_strings(own.stop),
            tool_set=ToolSet.of(own.tools, own.tool_choice),
            form=constraint_of(options),
            max_reasoning_tokens=own.thinking_budget,
        )

    def _messages(self, conversation: Any) -> Sequence[Message]:
        """The messages of a conversation. Raises `InvalidRequest` unless it is a text or a list."""
        if isinstance(conversation, str):
            return [{"role": "user", "content": conversation}]
        if not isinstance(conversation, Sequence) or not conversation:
            raise InvalidRequest(
                "A conversation is a text or a list of messages, and never empty.",
                param="messages",
            )
        return [self._message(message) for message in conversation]

    def _message(self, message: Any) -> Message:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _no_message()
        content = message.get("content")
        if calls := message.get("tool_calls"):
            try:
                called = [ToolCall.model_validate(call).for_template() for call in calls]
            except (ValidationError, TypeError) as error:
                raise InvalidRequest(f"tool_calls: {error}.", param="messages") from error
            return {**message, "content": content or "", "tool_calls": called}
        if isinstance(content, list | tuple):
            return {**message, "content": [self._part(part) for part in content]}
        if content is not None and not isinstance(content, str):
            raise _no_message()
        return message

    def _part(self, part: Any) -> str | ImageSource:
        """A part of a message's content."""
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise _no_message()
        return str(part["text"])


class _CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a call in addition to the fields of `SamplingParams`."""

    max_tokens: int | None = None
    stop: str | tuple[str, ...] = ()
    n: int = 1
    adapter: str = ""
    seed: int | None = None
    ignore_eos: bool = False
    tools: tuple[Any, ...] = ()
    tool_choice: Any = None
    thinking_budget: int | None = None
    sampling: SamplingParams | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the call sets here."""
        fields = {} if self.sampling is None else msgspec.structs.asdict(self.sampling)
        for name in _OWN_FIELDS:
            fields.pop(name, None)
        return {**fields, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}


_OWN_FIELDS = ("seed", "sample_index", "returns_state")
"""Fields of `SamplingParams` that the service sets."""
_REFUSED = {
    "return_hidden_states": "Hidden states are not returned: EmbeddingPipeline pools them.",
    "stream": "Call `stream` for an answer piece by piece.",
}
"""Options of other libraries' calls, and what to use instead."""


def _call_options(options: Mapping[str, Any]) -> _CallOptions:
    for name in _REFUSED.keys() & options.keys():
        raise UnsupportedOption(_REFUSED[name], param=name)
    names = _CallOptions.__struct_fields__
    given = {name: options[name] for name in names if options.get(name) is not None}
    try:
        own = convert(given, _CallOptions)
        tools, choice = tuple(map(Tool.model_validate, own.tools)), own.tool_choice
        if choice not in (None, "auto", "none", "required"):
            choice = NamedTool.model_validate(choice)
        return msgspec.structs.replace(own, tools=tools, tool_choice=choice)
    except (msgspec.ValidationError, ValidationError) as error:
        raise InvalidRequest(f"Call options: {error}.") from error


def _as_batch(conversation: Any) -> list[Any] | None:
    """The conversations of a batch, or `None` for a single conversation."""
    is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
    if not is_list or not conversation or isinstance(conversation[0], Mapping):
        return None
    return list(conversation)


def _raw_prompts(prompt: Any) -> tuple[list[RawPrompt], bool]:
    """The prompts of a call without a template, and whether it has a batch of them."""
    if isinstance(prompt, str):
        return [prompt], False
    entries = list(prompt) if isinstance(prompt, list | tuple) else []
    if _are_ids(entries):
        return [entries], False
    if not entries or not all(isinstance(each, str) or _are_ids(each) for each in entries):
        raise InvalidRequest(
            "A prompt is a text, or token ids; a batch is a list of them.", param="prompt"
        )
    return entries, True


def _are_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return is_list and all(isinstance(each, int) for each in prompt)


def _no_message() -> InvalidRequest:
    return InvalidRequest(
        'A message is {"role": ..., "content": ...}; its content is a text, or parts of text.',
        param="messages",
    )


def _sample(deltas: Sequence[SampleDelta]) -> ChatSample:
    last = deltas[-1]
    assert last.finish_reason is not None
    answer = Answer.of(piece for delta in deltas for piece in delta.shown)
    return ChatSample(
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=tuple(answer.calls),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=TokenUsage(**{each.name: getattr(last, each.name) for each in fields(TokenUsage)}),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
    )

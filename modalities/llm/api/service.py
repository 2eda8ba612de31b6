"""Text in, text out: what HTTP routes and the Python pipeline share.

Owns the way of a call from messages to a stream of text: prompts, checks, admission, one engine job
per sample, detokenising, stop strings, usage. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self

import msgspec

from triptych.core.caller import Caller
from triptych.core.client import EngineClient
from triptych.core.config import Config
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError
from triptych.core.grammar.source import Constraint
from triptych.core.limits import MAX_HELD_PICTURE_BYTES
from triptych.core.text.threads import on_text_thread
from triptych.core.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.modalities.llm.api.checks import check_call, check_request, sampling_params
from triptych.modalities.llm.api.detokenizer import Detokenizer
from triptych.modalities.llm.api.multimodal import Message, PromptEncoder, pictures_of, words_of
from triptych.modalities.llm.api.text import TextModel, text_size
from triptych.modalities.llm.api.tools.faults import blamed
from triptych.modalities.llm.api.tools.pieces import AnswerPiece, CallStart, Words
from triptych.modalities.llm.api.tools.prompt import in_words
from triptych.modalities.llm.api.tools.schema import Offer
from triptych.modalities.service import HoldLimit, ModelService, default_seed, merge
from triptych.schedulers.admission import Admission

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """What is a call's own, beside its requests: each of those is sampled `num_samples` times.

    The service sets the requests' `seed` (without one here it draws one) and `sample_index`. With
    `echo` each sample's text begins with its prompt. Where there is an `offer` of tools, even of
    none, the text is taken apart into thoughts, words and calls. The text has special tokens and
    what ended it only where the call `shows` them.
    """

    model: str
    num_samples: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    echo: bool = False
    shows_special: bool = False
    shows_stop: bool = False
    offer: Offer | None = None
    caller: Caller = field(default_factory=Caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One token with its text, bytes and log-probability (`None` for the first of a prompt).

    `shown` are those of its bytes that the answer's text has: none of a special token.
    """

    token_id: int
    text: str
    data: bytes
    shown: bytes
    logprob: float | None
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of one sample so far; the output counts a stop token, which costs a step too.

    Prompt tokens count those that pictures fill, which are `num_image_tokens`. Of the pictures
    `num_cached_images` did not have to be encoded, and `num_reasoning_tokens` of the output are
    thoughts.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_image_tokens: int = 0
    num_cached_images: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """The ids of a prompt and, where its log-probabilities were asked for, its tokens.

    Those take long to tell where there are many.
    """

    token_ids: tuple[int, ...]
    tokens: Callable[[], tuple[TokenText, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """What one step added to one sample (`index` = prompt index x n + sample index).

    `pieces` are the text taken apart, where that was asked for. The first delta has the `prompt`.
    """

    index: int
    text: str
    pieces: tuple[AnswerPiece, ...] | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: TokenUsage
    prompt: PromptTokens | None = None

    @property
    def drawn_ids(self) -> tuple[int, ...]:
        """The tokens that the model drew, one that ended the sample among them."""
        end = self.stop_reason
        return (*self.token_ids, end) if isinstance(end, int) else self.token_ids

    @property
    def shown(self) -> tuple[AnswerPiece, ...]:
        """The pieces; the text is one, where it was not taken apart."""
        if self.pieces is not None:
            return self.pieces
        return (Words(self.text),) if self.text else ()


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
        self._pictures = HoldLimit("Too many pictures are being looked at; try later.")

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
        """Whether `model` takes pictures."""
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
        if not text.answers.is_told:
            messages, tools = await _told(messages, tools), ()
        if self.sees(model):
            encoder = self._encoders[text.name]
        elif pictures_of(messages):
            seeing = ", ".join(self._encoders) or "none; `--model triptych-vision` is one"
            raise InvalidRequest(
                f"{model} reads text alone. Models here that see pictures: {seeing}.",
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
        """A conversation without pictures as `model` reads it."""
        text = self.model(model)
        if not text.answers.is_told:
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
        offer: Offer,
        form: Constraint | None = None,
        max_thinking_tokens: int | None = None,
    ) -> Sequence[TokenRequest]:
        """`prompts` with a form for what is no thought, and for calls, as `constrained` does it.

        Thoughts end after `max_thinking_tokens`, if they are bounded.
        """
        text = self.model(model)
        size = text_size(list(offer.schemas.values()))
        requests: list[TokenRequest] = []
        for prompt in prompts:
            ids = prompt.prompt_ids
            constraint = await on_text_thread(size, text.answer_constraint, ids, offer, form)
            rules = text.thinking_rules(ids, max_thinking_tokens, has_form=constraint is not None)
            try:
                (request,) = await self.constrained(model, [prompt], constraint)
            except RequestError as error:
                raise await blamed(error, offer, text.grammars.check) from error
            requests.append(msgspec.structs.replace(request, thinking=rules))
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
        if num_bytes > MAX_HELD_PICTURE_BYTES:
            raise PayloadTooLarge(
                "The pictures are too large for so many samples: ask for fewer.", param="n"
            )
        admitted = self._admission.admit(
            key=call.caller.principal.key, num_jobs=n * len(requests), num_tokens=num_tokens
        )
        with admitted, self._pictures.holding(num_bytes, MAX_HELD_PICTURE_BYTES):
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
        job_id, deadline_s = f"{call.caller.call_id}.{index}", call.caller.deadline_s
        outputs = self.client.submit(call.model, request, job_id=job_id, deadline_s=deadline_s)
        sample = _SampleText(index, request, model, call)
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


class _SampleText:
    """Turns one job's token deltas into text deltas."""

    def __init__(self, index: int, request: TokenRequest, model: TextModel, call: TextCall) -> None:
        self._index = index
        self._model = model
        self._num_prompt_tokens = len(request.prompt_ids)
        self._num_image_tokens = sum(entry.span.num_features for entry in request.contents)
        self._num_cached_tokens = 0
        self._num_cached_images = 0
        self._num_output_tokens = 0
        self._parser = (
            None if call.offer is None else model.answer_parser(request.prompt_ids, call.offer)
        )
        has_special_marks = self._parser is not None and model.answers.has_special_marks
        self._detokenizer: Detokenizer = model.detokenizer(
            request.prompt_ids,
            call.stop,
            shows_special=call.shows_special or has_special_marks,
            shows_stop=call.shows_stop,
        )
        self._call = call
        self._most_calls = 1 if call.offer and call.offer.has_one_call else math.inf
        self._num_calls = 0
        self._num_reasoning_tokens = 0
        self._prompt_ids = request.prompt_ids
        self._scores_prompt = request.sampling.prompt_logprobs

    def push(self, delta: TokenDelta) -> SampleDelta:
        """The text delta of one engine delta; the first also carries an echoed prompt."""
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        self._num_cached_images = max(self._num_cached_images, delta.num_cached_contents)
        num_tokens = len(delta.token_ids) + (delta.stop_token_id is not None)
        self._num_output_tokens += num_tokens
        prompt = self._take_prompt(delta)
        echo_text, echo_logprobs = self._echo(prompt)
        shown_ids = delta.token_ids
        if self._call.shows_stop and delta.stop_token_id is not None:
            shown_ids = (*shown_ids, delta.stop_token_id)
        text, logprobs = self._detokenizer.push(shown_ids, delta.logprobs)
        stop = self._detokenizer.stop
        finish: FinishReason | None = None
        if stop is not None:
            finish = "stop"
        elif delta.finish_reason is not None:
            finish = "length" if delta.finish_reason == "length" else "stop"
            rest, rest_logprobs = self._detokenizer.flush()
            text, logprobs = text + rest, logprobs + rest_logprobs
        pieces, finish = self._parsed(text, finish)
        if self._parser is not None and self._parser.is_in_thoughts:
            self._num_reasoning_tokens += num_tokens
        return SampleDelta(
            index=self._index,
            text=echo_text + text,
            pieces=pieces,
            token_ids=delta.token_ids,
            logprobs=echo_logprobs + tuple(map(self._token_text, logprobs)),
            finish_reason=finish,
            stop_reason=delta.stop_token_id if stop is None else stop,
            usage=TokenUsage(
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
                num_output_tokens=self._num_output_tokens,
                num_image_tokens=self._num_image_tokens,
                num_cached_images=self._num_cached_images,
                num_reasoning_tokens=self._num_reasoning_tokens,
            ),
            prompt=prompt,
        )

    def _parsed(
        self, text: str, finish: FinishReason | None
    ) -> tuple[tuple[AnswerPiece, ...] | None, FinishReason | None]:
        """What further text is made of; an answer with calls ends because of them."""
        if self._parser is None:
            return None, finish
        found = self._parser.push(text) + (self._parser.finish() if finish else [])
        pieces: list[AnswerPiece] = []
        for piece in found:
            self._num_calls += isinstance(piece, CallStart)
            if self._num_calls > self._most_calls:
                return tuple(pieces), "tool_calls"
            pieces.append(piece)
        return tuple(pieces), "tool_calls" if finish == "stop" and self._num_calls else finish

    def _take_prompt(self, delta: TokenDelta) -> PromptTokens | None:
        """The prompt, once."""
        ids, self._prompt_ids = self._prompt_ids, ()
        if not ids:
            return None
        return PromptTokens(token_ids=ids, tokens=partial(self._scored, ids, delta.prompt_logprobs))

    def _scored(
        self, ids: tuple[int, ...], entries: Sequence[TokenLogprob]
    ) -> tuple[TokenText, ...]:
        if not self._scores_prompt:
            return ()
        first = self._plain_token(ids[0], None)  # it has no entry of its own
        return (first, *map(self._token_text, entries))

    def _echo(self, prompt: PromptTokens | None) -> tuple[str, tuple[TokenText, ...]]:
        if prompt is None or not self._call.echo:
            return "", ()
        skips_special = not self._call.shows_special
        text = self._model.decode(prompt.token_ids, skip_special_tokens=skips_special)
        return text, _as_shown(prompt.tokens(), text)

    def _token_text(self, entry: TokenLogprob) -> TokenText:
        top = tuple(self._plain_token(token_id, logprob) for token_id, logprob in entry.top)
        return self._plain_token(entry.token_id, entry.logprob, top)

    def _plain_token(
        self, token_id: int, logprob: float | None, top: tuple[TokenText, ...] = ()
    ) -> TokenText:
        data = self._model.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        is_hidden = self._model.token_bytes.is_special(token_id) and not self._call.shows_special
        shown = b"" if is_hidden else data
        return TokenText(
            token_id=token_id, text=text, data=data, shown=shown, logprob=logprob, top=top
        )


def _as_shown(tokens: tuple[TokenText, ...], text: str) -> tuple[TokenText, ...]:
    """The tokens of `text` from its beginning, where some tokenizers leave out a space."""
    index = next((n for n, token in enumerate(tokens) if token.shown), None)
    if index is None or text.startswith(" ") or not tokens[index].shown.startswith(b" "):
        return tokens
    first = replace(tokens[index], shown=tokens[index].shown[1:])
    return (*tokens[:index], first, *tokens[index + 1 :])

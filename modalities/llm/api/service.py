"""Text in, text out: what HTTP routes and the Python pipeline share.

Owns the way of a call from messages to a stream of text: template, admission, one engine job per
sample, detokenising, stop strings, usage. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Self

import msgspec

from triptych.core.client import EngineClient
from triptych.core.config import Config
from triptych.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    UnknownModel,
)
from triptych.core.frames import FIRST_FRAME_ID
from triptych.core.limits import MAX_HELD_PICTURE_BYTES
from triptych.core.prompt_content import PromptContent
from triptych.core.sampling_params import MAX_SAMPLES, MAX_STOP_STRINGS, SamplingParams
from triptych.core.text.threads import on_text_thread
from triptych.core.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.core.typed import convert
from triptych.modalities.llm.api.detokenizer import Detokenizer, TextPiece
from triptych.modalities.llm.api.merge import merge
from triptych.modalities.llm.api.multimodal import ChatPrompt, MultimodalEncoder, pictures_of
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.admission import Admission

_NOT_GIVEN = frozenset({"seed", "sample_index", "returns_state"})
"""Sampling parameters that are not a caller's to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One call: every prompt is sampled `num_samples` times.

    `sampling` is shared by all samples; the service sets its `sample_index`, and its `seed` from
    `seed` here (`None` draws one). `tenant` salts the prefix cache, `key` pays for admission.
    With `echo` each sample's text begins with its prompt. `pictures` are those of each prompt,
    where there are any.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    call_id: str
    num_samples: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tenant: str = ""
    key: str = ""
    priority: int = 0
    deadline_s: float | None = None
    echo: bool = False
    pictures: tuple[tuple[PromptContent, ...], ...] = ()


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
    `num_cached_images` did not have to be encoded.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_image_tokens: int = 0
    num_cached_images: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """What one step added to one sample (`index` = prompt index x n + sample index)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    usage: TokenUsage


class LlmService:
    """Serves text generation from an engine client."""

    def __init__(
        self,
        client: EngineClient,
        models: Sequence[TextModel],
        admission: Admission,
        *,
        eyes: Mapping[str, MultimodalEncoder] = MappingProxyType({}),
        default_seed: int | None = None,
    ) -> None:
        self.client = client
        self.eyes = eyes
        self.models: Mapping[str, TextModel] = {model.name: model for model in models}
        self._admission = admission
        self._default_seed = default_seed
        self._picture_bytes = 0

    @classmethod
    def from_config(
        cls,
        config: Config,
        models: Sequence[TextModel],
        client: EngineClient,
        *,
        eyes: Mapping[str, MultimodalEncoder] = MappingProxyType({}),
        admission: Admission | None = None,
    ) -> Self:
        """The service of `models` with the seed of a configuration, and its bounds; it is started.

        Models that see have their `eyes` there. An `admission` is shared with other services.
        """
        seed = config.device.seed if config.device.seed >= 0 else None
        admission = admission or Admission(options=config.schedule)
        service = cls(client, models, admission, eyes=eyes, default_seed=seed)
        service.start()
        return service

    @property
    def max_jobs(self) -> int:
        """Most samples one call may ask for, over all its prompts."""
        return self._admission.max_jobs

    def start(self) -> None:
        """Begin what the first conversations would otherwise wait for."""
        for model in self.models.values():
            model.start()

    async def close(self) -> None:
        """End the processes that run chat templates."""
        for model in self.models.values():
            await model.close()

    def model(self, name: str) -> TextModel:
        """The model called `name`. Raises `UnknownModel`, naming those there are."""
        if name not in self.models:
            raise UnknownModel.among(self.models, name)
        return self.models[name]

    async def encode_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tenant: str = "",
        **template_kwargs: Any,
    ) -> ChatPrompt:
        """A conversation as `model` takes it.

        Pictures are of use to `tenant` alone: calls with them are made for the same one.
        """
        text = self.model(model)
        if model in self.eyes:
            eyes = self.eyes[model]
            return await eyes.encode_chat(messages, tenant=tenant, **template_kwargs)
        if any(pictures_of(messages)):
            seeing = ", ".join(self.eyes) or "none; `--model triptych-vision` is one"
            raise InvalidRequest(
                f"{model} reads text alone. Models here that see pictures: {seeing}.",
                param="messages",
            )
        return ChatPrompt(await text.encode_chat(messages, **template_kwargs))

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

    def resolve_max_tokens(self, model: str, num_prompt_tokens: int, requested: int | None) -> int:
        """How many tokens may be generated. Raises `ContextLengthExceeded` if none or too few."""
        text = self.model(model)
        _check_length(text, num_prompt_tokens, 1 if requested is None else requested)
        return text.context_length - num_prompt_tokens if requested is None else requested

    def generate(self, call: GenerateCall) -> AsyncGenerator[SampleDelta, None]:
        """Run a call; deltas of all samples come merged, in the order they are made.

        Closing the iterator cancels every sample. Checks the call before anything is submitted.
        """
        model = self.model(call.model)
        _validate(call, model)
        return self._admitted(call, model)

    async def _admitted(
        self, call: GenerateCall, model: TextModel
    ) -> AsyncGenerator[SampleDelta, None]:
        num_rows = len(call.prompts) * call.num_samples
        num_prompt_tokens = sum(map(len, call.prompts)) * call.num_samples
        num_tokens = num_prompt_tokens + num_rows * call.sampling.max_tokens
        seed = next(
            s for s in (call.seed, self._default_seed, secrets.randbits(62)) if s is not None
        )
        admitted = self._admission.admit(key=call.key, num_jobs=num_rows, num_tokens=num_tokens)
        with admitted, self._holding(call):
            samples = [
                self._sample(call, model, prompt_index, sample_index, seed)
                for prompt_index in range(len(call.prompts))
                for sample_index in range(call.num_samples)
            ]
            async with aclosing(merge(samples)) as merged:
                async for delta in merged:
                    yield delta

    @contextmanager
    def _holding(self, call: GenerateCall) -> Iterator[None]:
        """Count the call's pictures, which the engine has until it ends."""
        pictures = (picture for several in call.pictures for picture in several)
        num_bytes = call.num_samples * sum(picture.num_bytes for picture in pictures)
        if num_bytes > MAX_HELD_PICTURE_BYTES:
            raise PayloadTooLarge(
                "The pictures are too large for so many samples: ask for fewer.", param="n"
            )
        if self._picture_bytes + num_bytes > MAX_HELD_PICTURE_BYTES:
            raise Overloaded("Too many pictures are being looked at; try later.", retry_after_s=5.0)
        self._picture_bytes += num_bytes
        try:
            yield
        finally:
            self._picture_bytes -= num_bytes

    async def _sample(
        self, call: GenerateCall, model: TextModel, prompt_index: int, sample_index: int, seed: int
    ) -> AsyncGenerator[SampleDelta, None]:
        index = prompt_index * call.num_samples + sample_index
        request = TokenRequest(
            prompt_ids=call.prompts[prompt_index],
            sampling=msgspec.structs.replace(call.sampling, seed=seed, sample_index=sample_index),
            pictures=call.pictures[prompt_index] if call.pictures else (),
            priority=call.priority,
            tenant=call.tenant,
        )
        outputs = self.client.submit(
            call.model, request, job_id=f"{call.call_id}.{index}", deadline_s=call.deadline_s
        )
        row = _SampleText(index, request, model, call)
        async with aclosing(outputs) as stream:
            async for output in stream:
                if isinstance(output.payload, TokenDelta):
                    delta = row.push(output.payload)
                    yield delta
                    if delta.finish_reason is not None:
                        return


def sampling_params(
    model: TextModel, *, ignore_eos: bool = False, given: Mapping[str, Any]
) -> SamplingParams:
    """Sampling parameters from what a caller gave over what the model recommends.

    Fields that are `None` count as not given. Raises `InvalidRequest` for a field that does not
    exist or has the wrong type; ranges are checked by `generate`.
    """
    known = sorted(set(SamplingParams.__struct_fields__) - _NOT_GIVEN)
    if unknown := sorted(set(given) - set(known)):
        raise InvalidRequest(
            f"Unknown option {unknown[0]!r}; sampling takes {', '.join(known)}.", param=unknown[0]
        )
    values = {**model.default_sampling, **{k: v for k, v in given.items() if v is not None}}
    end_ids = () if ignore_eos else model.eos_token_ids
    values["stop_token_ids"] = (*end_ids, *values.get("stop_token_ids", ()))
    try:
        return convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Sampling options: {error}.") from error


class _SampleText:
    """Turns one job's token deltas into text deltas."""

    def __init__(
        self, index: int, request: TokenRequest, model: TextModel, call: GenerateCall
    ) -> None:
        self._index = index
        self._model = model
        self._num_prompt_tokens = len(request.prompt_ids)
        self._num_image_tokens = sum(entry.span.num_features for entry in request.pictures)
        self._num_cached_tokens = 0
        self._num_cached_images = 0
        self._num_output_tokens = 0
        self._detokenizer: Detokenizer = model.detokenizer(request.prompt_ids, call.stop)
        self._echo_ids = request.prompt_ids if call.echo else ()
        self._scores_prompt = request.sampling.prompt_logprobs

    def push(self, delta: TokenDelta) -> SampleDelta:
        """The text delta of one engine delta; the first also carries an echoed prompt."""
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        self._num_cached_images = max(self._num_cached_images, delta.num_cached_pictures)
        self._num_output_tokens += len(delta.token_ids) + (delta.stop_token_id is not None)
        echo_text, echo_logprobs = self._take_echo(delta)
        piece = self._detokenizer.push(delta.token_ids, delta.logprobs)
        finish: Literal["stop", "length"] | None = None
        if piece.stop is not None:
            finish = "stop"
        elif delta.finish_reason is not None:
            finish = "length" if delta.finish_reason == "length" else "stop"
            rest = self._detokenizer.flush()
            piece = TextPiece(piece.text + rest.text, piece.logprobs + rest.logprobs)
        return SampleDelta(
            index=self._index,
            text=echo_text + piece.text,
            token_ids=delta.token_ids,
            logprobs=echo_logprobs + tuple(map(self._token_text, piece.logprobs)),
            finish_reason=finish,
            stop_reason=piece.stop if piece.stop is not None else delta.stop_token_id,
            usage=TokenUsage(
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
                num_output_tokens=self._num_output_tokens,
                num_image_tokens=self._num_image_tokens,
                num_cached_images=self._num_cached_images,
            ),
        )

    def _take_echo(self, delta: TokenDelta) -> tuple[str, tuple[TokenText, ...]]:
        if not self._echo_ids:
            return "", ()
        ids, self._echo_ids = self._echo_ids, ()
        logprobs: tuple[TokenText, ...] = ()
        if self._scores_prompt:  # the first prompt token has no entry of its own
            first = self._plain_token(ids[0], None)
            logprobs = (first, *map(self._token_text, delta.prompt_logprobs))
        text = self._model.decode(ids)
        return text, _as_shown(logprobs, text)

    def _token_text(self, entry: TokenLogprob) -> TokenText:
        top = tuple(self._plain_token(token_id, logprob) for token_id, logprob in entry.top)
        return self._plain_token(entry.token_id, entry.logprob, top)

    def _plain_token(
        self, token_id: int, logprob: float | None, top: tuple[TokenText, ...] = ()
    ) -> TokenText:
        data = self._model.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        shown = b"" if self._model.is_special(token_id) else data
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


def _validate(call: GenerateCall, model: TextModel) -> None:
    if not 1 <= call.num_samples <= MAX_SAMPLES:
        raise InvalidRequest(f"n must be between 1 and {MAX_SAMPLES}.", param="n")
    if len(call.stop) > MAX_STOP_STRINGS or any(not stop for stop in call.stop):
        raise InvalidRequest(
            f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty.", param="stop"
        )
    msgspec.structs.replace(call.sampling, seed=call.seed or 0).validate(model.vocab_size)
    least_picture_id = FIRST_FRAME_ID if any(call.pictures) else math.inf
    for prompt in call.prompts:
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        words = (token_id for token_id in prompt if token_id < least_picture_id)
        if any(not 0 <= token_id < model.vocab_size for token_id in words):
            raise InvalidRequest(
                f"Token ids lie between 0 and {model.vocab_size - 1}.", param="prompt"
            )
        _check_length(model, len(prompt), call.sampling.max_tokens)


def _check_length(model: TextModel, num_prompt_tokens: int, num_output_tokens: int) -> None:
    if num_prompt_tokens + num_output_tokens > model.context_length:
        raise ContextLengthExceeded(
            f"{model.name} takes {model.context_length} tokens of context: {num_prompt_tokens} of"
            f" prompt and {num_output_tokens} of output do not fit. Shorten the prompt or lower"
            " max_tokens."
        )

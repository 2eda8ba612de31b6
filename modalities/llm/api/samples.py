"""One sample of an answer: the settings of its call, and the text delta of each step.

Owns the way from a job's token deltas to text: detokenizing, stop strings, log-probabilities, an
echoed prompt, parsing of reasoning and calls, token counts. Knows neither how jobs run nor HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from triptych.core.engine_api.caller import Caller
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.core.grammar.constraint import Constraint
from triptych.modalities.llm.api.detokenizer import Detokenizer
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.json_text import load_json
from triptych.modalities.llm.api.tools.pieces import AnswerPiece, CallArguments, CallStart, Words
from triptych.modalities.llm.api.tools.schema import ToolSet

FinishReason = Literal["stop", "length", "tool_calls"]
_NO_ANSWER: Mapping[str, Any] = MappingProxyType(
    {"token_ids": (), "logprobs": (), "stop_token_id": None, "finish_reason": "length"}
)
"""Replaces the answer in a delta that only scores a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """Settings of one API call. Each prompt is sampled `n` times.

    `sampling` holds the fields of `SamplingParams` that the caller set. Without `max_tokens` an
    answer may fill the room that the longest prompt leaves, up to `default_tokens`; with a
    `context_length`, `max_tokens` is lowered to the room left in it. Without `seed` the service
    chooses one.

    With `echo` a sample begins with its prompt; it ends there unless the call `has_answer`. With a
    `tool_set`, even an empty one, the text is parsed into reasoning, words and calls; with a
    `form`, JSON is a call only between marks. An `adapter` changes the model, unless `model` is the
    name of one. Log-probabilities are those of tokens in the text, or
    of all sampled tokens where the call `scores_all`.
    """

    model: str
    adapter: str = ""
    n: int = 1
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    default_tokens: int | None = None
    context_length: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    priority: int = 0
    echo: bool = False
    has_answer: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    scores_all: bool = False
    tool_set: ToolSet | None = None
    form: Constraint | None = None
    max_reasoning_tokens: int | None = None
    caller: Caller = field(default_factory=Caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One token with its text, bytes and log-probability (`None` for the first of a prompt).

    `shown` are its bytes that are part of the answer's text: none for a special token.
    """

    token_id: int
    text: str
    data: bytes
    shown: bytes
    logprob: float | None
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Token counts of one sample so far; the output includes a stop token, which also costs a step.

    Prompt tokens include the `num_image_tokens` that images fill. `num_cached_images` images were
    found encoded, and `num_reasoning_tokens` of the output are reasoning.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_image_tokens: int = 0
    num_cached_images: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """The ids of a prompt and, where its log-probabilities were requested, its tokens.

    `echo` returns the prompt's text and tokens, which precede those of the sample; `None` without
    echo. Tokens are created lazily: many objects at once would stall the event loop in Python's
    garbage collector.
    """

    token_ids: tuple[int, ...]
    tokens: Callable[[], Iterator[TokenText]]
    echo: Callable[[], tuple[str, Iterator[TokenText]]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta(TokenUsage):
    """The text of one step of one sample (`index` = prompt index x n + sample index), and counts.

    `pieces` are the parsed text, where the call has a tool set. The first delta has the `prompt`,
    whose echo is not part of `text`.
    """

    index: int
    text: str
    pieces: tuple[AnswerPiece, ...] | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt: PromptTokens | None = None

    @property
    def has_echo(self) -> bool:
        """Whether this delta begins a sample with its prompt."""
        return self.prompt is not None and self.prompt.echo is not None

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the model sampled, including one that ended the sample."""
        end = self.stop_reason
        return (*self.token_ids, end) if isinstance(end, int) else self.token_ids

    @property
    def shown(self) -> tuple[AnswerPiece, ...]:
        """The pieces; unparsed text is one piece."""
        if self.pieces is not None:
            return self.pieces
        return (Words(self.text),) if self.text else ()


class SampleText:
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
            None
            if call.tool_set is None
            else model.answer_parser(
                request.prompt_ids, call.tool_set, has_form=call.form is not None
            )
        )
        has_special_marks = self._parser is not None and model.answers.has_special_marks
        self._detokenizer: Detokenizer = model.detokenizer(
            request.prompt_ids,
            call.stop,
            skip_special_tokens=call.skip_special_tokens and not has_special_marks,
            include_stop_str_in_output=call.include_stop_str_in_output,
        )
        self._call = call
        self._most_calls = 1 if call.tool_set and call.tool_set.has_one_call else math.inf
        self._num_calls = 0
        self._arguments: list[str] = []  # of the latest call
        self._has_broken_call = False
        self._num_reasoning_tokens = 0
        self._prompt_ids = request.prompt_ids
        self._scores_prompt = request.sampling.prompt_logprobs

    def push(self, delta: TokenDelta) -> SampleDelta:
        """The text delta of one engine delta; the first also carries the prompt."""
        if not self._call.has_answer:
            delta = msgspec.structs.replace(delta, **_NO_ANSWER)
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        self._num_cached_images = max(self._num_cached_images, delta.num_cached_contents)
        num_tokens = len(delta.token_ids) + (delta.stop_token_id is not None)
        self._num_output_tokens += num_tokens
        shown_ids = delta.token_ids
        if self._call.include_stop_str_in_output and delta.stop_token_id is not None:
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
        scored = [self._token_text(entry) for entry in logprobs]
        if finish is not None and self._call.scores_all:
            unshown = (*self._detokenizer.unshown(), *delta.logprobs[len(shown_ids) :])
            scored += (replace(self._token_text(entry), shown=b"") for entry in unshown)
        pieces, finish = self._parse(text, finish)
        if self._parser is not None and self._parser.is_in_reasoning:
            self._num_reasoning_tokens += num_tokens
        return SampleDelta(
            index=self._index,
            text=text,
            pieces=pieces,
            token_ids=delta.token_ids,
            logprobs=tuple(scored),
            finish_reason=finish,
            stop_reason=delta.stop_token_id if stop is None else stop,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_image_tokens=self._num_image_tokens,
            num_cached_images=self._num_cached_images,
            num_reasoning_tokens=self._num_reasoning_tokens,
            prompt=self._take_prompt(delta),
        )

    def _parse(
        self, text: str, finish: FinishReason | None
    ) -> tuple[tuple[AnswerPiece, ...] | None, FinishReason | None]:
        """The pieces of further text, and the finish reason: `tool_calls` where there are calls.

        An incomplete call makes the reason `length`, so that clients do not run it.
        """
        if self._parser is None:
            return None, finish
        found = self._parser.push(text) + (self._parser.finish() if finish else [])
        pieces: list[AnswerPiece] = []
        for piece in found:
            if isinstance(piece, CallStart):
                self._end_call()
                self._num_calls += 1
            elif isinstance(piece, CallArguments):
                self._arguments.append(piece.text)
            if self._num_calls > self._most_calls:
                finish = "stop"
                break
            pieces.append(piece)
        if finish == "stop" and self._num_calls:
            self._end_call()
            finish = "length" if self._has_broken_call else "tool_calls"
        return tuple(pieces), finish

    def _end_call(self) -> None:
        """Note that the arguments of the latest call, if any, are complete."""
        text, self._arguments = "".join(self._arguments), []
        self._has_broken_call |= bool(text) and load_json(text) is None

    def _take_prompt(self, delta: TokenDelta) -> PromptTokens | None:
        """The prompt, once."""
        ids, self._prompt_ids = self._prompt_ids, ()
        if not ids:
            return None
        tokens = partial(self._score_prompt, ids, delta.prompt_logprobs)
        echo = partial(self._echo, ids, tokens) if self._call.echo else None
        return PromptTokens(token_ids=ids, tokens=tokens, echo=echo)

    def _score_prompt(
        self, ids: tuple[int, ...], entries: Sequence[TokenLogprob]
    ) -> Iterator[TokenText]:
        if self._scores_prompt:
            yield self._plain_token(ids[0], None)  # nothing predicts the first token
            yield from map(self._token_text, entries)

    def _echo(
        self, ids: tuple[int, ...], tokens: Callable[[], Iterator[TokenText]]
    ) -> tuple[str, Iterator[TokenText]]:
        text = self._model.decode(ids, skip_special_tokens=self._call.skip_special_tokens)
        return text, _as_shown(tokens(), text)

    def _token_text(self, entry: TokenLogprob) -> TokenText:
        top = tuple(self._plain_token(token_id, logprob) for token_id, logprob in entry.top)
        return self._plain_token(entry.token_id, entry.logprob, top)

    def _plain_token(
        self, token_id: int, logprob: float | None, top: tuple[TokenText, ...] = ()
    ) -> TokenText:
        data = self._model.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        is_hidden = self._call.skip_special_tokens and self._model.token_bytes.is_special(token_id)
        shown = b"" if is_hidden else data
        return TokenText(
            token_id=token_id, text=text, data=data, shown=shown, logprob=logprob, top=top
        )


def _as_shown(tokens: Iterable[TokenText], text: str) -> Iterator[TokenText]:
    """The tokens of `text`; drops a leading space that the tokenizer left out of the text."""
    has_begun = text.startswith(" ")
    for token in tokens:
        if not has_begun and token.shown.startswith(b" "):
            yield replace(token, shown=token.shown[1:])
        else:
            yield token
        has_begun = has_begun or bool(token.shown)

"""The answers of the OpenAI text API, whole and in chunks.

Owns their fields. A field is sent if it was set: OpenAI sends some as null and omits others. Knows
nothing of HTTP.
"""

from __future__ import annotations

import secrets
from string import ascii_letters, digits
from typing import Any, Literal

from pydantic import BaseModel
from typing_extensions import TypedDict

from triptych.core.http.models import ModelCard
from triptych.modalities.llm.api.samples import FinishReason, SampleDelta, TokenText
from triptych.modalities.llm.api.text import TextModel

_LEAST_LOGPROB = -9999.0  # OpenAI's


class PromptDetails(BaseModel):
    """Kinds of prompt tokens; `audio_tokens` are those of recordings, in addition to their words.

    With images, `image_tokens` are the tokens that they fill, and `cached_images` is the number of
    images that were found encoded.
    """

    cached_tokens: int
    audio_tokens: int | None = None
    image_tokens: int | None = None
    cached_images: int | None = None


class OutputDetails(BaseModel):
    """Kinds of output tokens; `audio_tokens` are those of a spoken answer's sound."""

    reasoning_tokens: int
    audio_tokens: int | None = None


class UsageReply(BaseModel):
    """Token counts of a request. A prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


class TopLogprob(BaseModel):
    """One token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(TopLogprob):
    """A token of the answer, with the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(TypedDict):
    """A token of the prompt or an alternative, with its rank if it is among the likeliest.

    The fields are vLLM's, as are all fields about prompts.
    """

    # A plain dict: hundreds of thousands of objects would cause a pause of the garbage collector.

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt the alternatives by id; `None` for the first, which is not scored."""


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionReply(BaseModel):
    """A function and its arguments as JSON text, or a piece of that text."""

    name: str = ""
    arguments: str


class ToolCallReply(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class ToolCallDelta(BaseModel):
    """A piece of the call with this index."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionReply


class AnswerAudio(BaseModel):
    """The sound of an answer: a file in base64, and its words.

    A later message may refer to it by `id` until `expires_at` (seconds since 1970).
    """

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerAudioDelta(BaseModel):
    """A piece of the sound of an answer: its next words, its next bytes, or its end.

    The first has the id. Joined, the base64 of all pieces is that of the file.
    """

    id: str = ""
    data: str = ""
    expires_at: int = 0
    transcript: str = ""


class AnswerMessage(BaseModel):
    """A chat answer; `reasoning` is `reasoning_content` by another name.

    A spoken answer has `audio` in place of a content.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallReply] = []
    audio: AnswerAudio | None = None


class MessageDelta(BaseModel):
    """A piece of a chat answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    audio: AnswerAudioDelta | None = None


class ChatChoice(BaseModel):
    """One sample of a chat answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = []


class ChatChunkChoice(BaseModel):
    """A piece of one sample."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = []


class CompletionChoice(BaseModel):
    """One sample of a text completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []


class ReplyHead(BaseModel):
    """The first fields of every answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatReply(ReplyHead):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[int] = []


class ChatChunk(ReplyHead):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None
    prompt_token_ids: list[int] = []


class CompletionReply(ReplyHead):
    """Answer of `/v1/completions`, or one event of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: UsageReply | None = None


Chunk = ChatChunk | CompletionReply


class TokenPiece(BaseModel):
    """A token with its text, or with its bytes if they are not text by themselves."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    """Answer of `/tokenize`."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Prompt(BaseModel):
    """Answer of `/apply-template`."""

    prompt: str


class DecodedText(Prompt):
    """Answer of `/detokenize`: the text under the names of vLLM and llama.cpp."""

    content: str


class UsageTotals:
    """Adds up the token counts of a request's samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._last: dict[int, SampleDelta] = {}
        self.num_heard_tokens = 0
        """Tokens of sound in the prompt."""
        self.num_spoken_tokens = 0
        """Tokens of the answer's sound so far."""

    def add(self, delta: SampleDelta) -> None:
        """Record a sample's latest counts."""
        self._last[delta.index] = delta

    def total(self) -> UsageReply:
        """The counts of the request so far."""
        firsts = [use for index, use in self._last.items() if index % self._num_samples == 0]
        prompt = sum(use.num_prompt_tokens for use in firsts)
        output = sum(use.num_output_tokens for use in self._last.values())
        details = PromptDetails(cached_tokens=sum(use.num_cached_tokens for use in firsts))
        if image := sum(use.num_image_tokens for use in firsts):
            details.image_tokens = image
            details.cached_images = sum(use.num_cached_images for use in firsts)
        prompt, output = prompt + self.num_heard_tokens, output + self.num_spoken_tokens
        if self.num_heard_tokens:
            details.audio_tokens = self.num_heard_tokens
        reasoning = sum(use.num_reasoning_tokens for use in self._last.values())
        output_details = OutputDetails(reasoning_tokens=reasoning)
        if self.num_spoken_tokens:
            output_details.audio_tokens = self.num_spoken_tokens
        return UsageReply(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=details,
            completion_tokens_details=output_details,
        )


def chat_logprob(entry: TokenText) -> ChatLogprob:
    """A token of an answer, with its log-probability."""
    top = [TopLogprob(**_token_fields(other)) for other in entry.top]
    return ChatLogprob(**_token_fields(entry), top_logprobs=top)


def _token_fields(entry: TokenText) -> dict[str, Any]:
    logprob = finite_logprob(entry.logprob or 0.0)
    return {"token": entry.text, "bytes": list(entry.data), "logprob": logprob}


def finite_logprob(logprob: float) -> float:
    """A log-probability as JSON has it, without minus infinity."""
    return max(logprob, _LEAST_LOGPROB)


def new_call_id() -> str:
    """A new id of a call: nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


def card_of(model: TextModel, *, sees: bool = False) -> ModelCard:
    """The entry of `model` in `/v1/models`."""
    return ModelCard(
        id=model.name,
        created=model.created,
        task="chat",
        max_model_len=model.context_length,
        input_modalities=["text", "image"] if sees else None,
    )

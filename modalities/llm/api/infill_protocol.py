"""llama.cpp's `/infill`: the request and the answer, field by field.

Owns the fields of both. Editors send hints that have no effect here: those are ignored and reported
in a header, as on the other routes. Knows neither tokens nor the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from triptych.core import limits
from triptych.core.errors import UnsupportedOption
from triptych.core.http.fields import Strict, Text
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.protocol import TextRequest, smallest
from triptych.modalities.llm.api.unsupported import COMMON, IGNORED

_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "n_indent": "n_predict and stop end an answer",
        "response_fields": "an answer always has all fields",
        "samplers": "each has its own field; their order is fixed",
        "t_max_predict_ms": "n_predict bounds an answer",
        "t_max_prompt_ms": "a prompt is always read whole",
    }
)
_HONOURED = ("n_predict", "return_tokens")


class ExtraText(Strict):
    """A further text of a project."""

    filename: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    text: Text


class InfillRequest(TextRequest):
    """Body of `/infill`."""

    refused = MappingProxyType(
        {name: field for name, field in COMMON.items() if name not in {*_HINTS, *_HONOURED}}
    )
    ignored = MappingProxyType({**IGNORED, **_HINTS})

    input_prefix: Text = Field(default="", description="The text before the gap.")
    input_suffix: Text = Field(default="", description="The text after the gap.")
    input_extra: Annotated[
        list[ExtraText], Field(max_length=limits.MAX_MESSAGES, fail_fast=True)
    ] = Field(
        default=[],
        description="Further texts of the project; the first are left out where they do not fit.",
    )
    prompt: Text = Field(default="", description="The beginning of the answer, already written.")
    n_predict: Annotated[int, Field(ge=-1, le=SAMPLING_RANGES["max_tokens"][1])] | None = Field(
        default=None,
        description="Max tokens of the answer; -1: as many as fit; 0: none, to cache the prompt.",
    )
    return_tokens: bool | None = Field(default=None, description="Also return token ids.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"):
            if getattr(self, name):
                raise UnsupportedOption(
                    f"{name} is not offered here: post prompt and suffix to /v1/completions.",
                    param=name,
                )
        if self.n not in (None, 1):
            raise UnsupportedOption("n is 1 here: send several requests.", param="n")
        return self

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer; otherwise the prompt is only cached."""
        return self.n_predict != 0

    def sampling(self) -> dict[str, Any]:
        """The fields of `TextRequest.sampling`, with llama.cpp's name of the length."""
        most = smallest(self.max_tokens, self.n_predict) if self.has_answer else 1
        return {**super().sampling(), "max_tokens": most}


class Timings(BaseModel):
    """Tokens and milliseconds of the prompt and of the answer."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class InfillChunk(BaseModel):
    """A piece of an answer in a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    tokens_predicted: int
    tokens_evaluated: int


class InfillReply(BaseModel):
    """The answer, or the last document of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    has_new_line: bool
    truncated: Literal[False]
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: Timings

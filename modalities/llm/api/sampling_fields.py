"""Request fields about sampling and the end of an answer.

Owns the values of these fields on every text route that uses OpenAI's names. Other fields belong to
the routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest
from triptych.core.http.fields import Label, Strict, inert
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.messages import is_list


def within(name: str, description: str) -> Any:
    """An optional sampling number in its common range."""
    low, high = SAMPLING_RANGES[name]
    return Field(default=None, ge=low, le=high, description=description)


def penalty(description: str) -> Any:
    """An optional penalty factor for tokens that occurred before."""
    high = SAMPLING_RANGES["repetition_penalty"][1]
    return Field(default=None, gt=0, le=high, description=description)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings of a request, one or several; a single empty text means none."""
    if isinstance(stop, str):
        return (stop,) if stop else ()
    return tuple(stop or ())


StopString = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[str, StringConstraints(max_length=limits.MAX_STOP_CHARS), Tag(":text")]
    | Annotated[
        list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True), Tag(":list")
    ],
    Discriminator(is_list),
]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID)]
LogitBias = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$", max_length=10)],
        Annotated[float, Field(ge=-limits.MAX_ABS_LOGIT_BIAS, le=limits.MAX_ABS_LOGIT_BIAS)],
    ],
    Field(max_length=limits.MAX_LOGIT_BIAS),
]


class SamplingFields(Strict):
    """Sampling parameters and the end of an answer."""

    temperature: float | None = within("temperature", "0 is greedy.")
    top_p: float | None = within("top_p", "Nucleus sampling; 1 is off.")
    top_k: int | None = Field(
        default=None,
        ge=-1,
        le=SAMPLING_RANGES["top_k"][1],
        description="Sample from the k likeliest tokens; 0 and -1 are off.",
    )
    min_p: float | None = within("min_p", "Drop tokens below this share of the likeliest.")
    repetition_penalty: float | None = penalty("1 is off.")
    repeat_penalty: float | None = penalty("As repetition_penalty, its name in llama.cpp.")
    frequency_penalty: float | None = within("frequency_penalty", "Per repetition; 0 is off.")
    presence_penalty: float | None = within("presence_penalty", "Once; 0 is off.")
    logit_bias: LogitBias | None = Field(default=None, description="Token id to added logit.")
    min_tokens: int | None = within("min_tokens", "Min tokens before the answer may end.")
    seed: int | None = within("seed", "Same seed, same answer.")
    stop: Stop | None = Field(default=None, description="Text that ends an answer; '' means none.")
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = Field(default=None, description="Tokens that end an answer.")
    ignore_eos: bool | None = Field(
        default=None, description="Continue past the model's EOS token."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Show the stop string or token that ended an answer."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of answers (the default)."
    )
    priority: Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = Field(
        default=None,
        description="Lower runs first, under `--schedule-policy priority`; higher with"
        " `--no-schedule-low-priority-values-first`.",
    )

    @model_validator(mode="after")
    def _check_penalties(self) -> Self:
        if len({self.repetition_penalty, self.repeat_penalty} - {None}) > 1:
            raise InvalidRequest(
                "repeat_penalty and repetition_penalty are the same field and differ: send only the"
                " latter.",
                param="repeat_penalty",
            )
        return self


class InertLabels(Strict):
    """Fields of OpenAI's chat and responses on which no answer depends here."""

    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = inert(
        "service_tier"
    )
    safety_identifier: Label | None = inert("safety_identifier")
    prompt_cache_key: Label | None = inert("prompt_cache_key")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = inert(
        "prompt_cache_retention"
    )

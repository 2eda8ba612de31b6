"""Checks of a call before its jobs are submitted.

Owns which sampling parameters a caller may set, and the limits of requests to a model. Knows
nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.sampling_params import MAX_SAMPLES, MAX_STOP_STRINGS, SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ContextLengthExceeded, InvalidRequest, UnsupportedOption
from triptych.core.process.typed import convert
from triptych.modalities.llm.api.samples import TextCall
from triptych.modalities.llm.api.text import TextModel

_NOT_GIVEN = frozenset({"seed", "sample_index", "returns_state"})
"""Sampling parameters that callers cannot set."""


def sampling_params(
    model: TextModel, *, ignore_eos: bool = False, given: Mapping[str, Any]
) -> SamplingParams:
    """Sampling parameters from a caller's fields over the model's recommended ones.

    Fields that are `None` count as not given. Raises `InvalidRequest` for a field that does not
    exist or has the wrong type; `SamplingParams.validate` checks ranges.
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


def call_sampling(
    model: TextModel, call: TextCall, prompts: Sequence[TokenRequest]
) -> SamplingParams:
    """Sampling parameters of a call, without its seed and with the length of its answers.

    Raises `InvalidRequest` as `sampling_params` does, and `ContextLengthExceeded` where the prompt
    leaves no room in the call's own `context_length`.
    """
    length = min(call.context_length or model.context_length, model.context_length)
    num_tokens = max(len(prompt.prompt_ids) for prompt in prompts)
    room = length - num_tokens
    if call.context_length is not None and room <= 0:
        raise ContextLengthExceeded(
            f"{num_tokens} tokens of prompt leave no room in a context of {length}: shorten it."
        )
    max_tokens = call.sampling.get("max_tokens")
    if max_tokens is None:
        room = max(1, room)  # `check_request` refuses prompts that leave none
        max_tokens = min(room, call.default_tokens or room)
    elif call.context_length is not None:
        max_tokens = min(max_tokens, room)
    given = {**call.sampling, "max_tokens": max_tokens}
    return sampling_params(model, ignore_eos=call.ignore_eos, given=given)


def check_call(call: TextCall) -> None:
    """Raise `InvalidRequest` for a call's number of samples or its stop strings."""
    if not 1 <= call.n <= MAX_SAMPLES:
        raise InvalidRequest(f"n must be between 1 and {MAX_SAMPLES}.", param="n")
    if len(call.stop) > MAX_STOP_STRINGS or any(not stop for stop in call.stop):
        raise InvalidRequest(
            f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty.", param="stop"
        )


def check_request(request: TokenRequest, model: TextModel) -> None:
    """Raise a `RequestError` for a prompt or a length that the model cannot take."""
    prompt_ids = request.prompt_ids
    if not prompt_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if request.contents and request.sampling.prompt_logprobs:
        raise UnsupportedOption(
            "prompt_logprobs is not offered with images: leave it out.", param="prompt_logprobs"
        )
    if len(prompt_ids) + request.sampling.max_tokens > model.context_length:
        raise ContextLengthExceeded(
            f"{model.name} takes {model.context_length} tokens of context: {len(prompt_ids)} of"
            f" prompt and {request.sampling.max_tokens} of output do not fit. Shorten the prompt or"
            " lower max_tokens."
        )
    _check_reasoning(request)
    words: Sequence[int] = prompt_ids
    if request.contents:
        words = [token_id for token_id in prompt_ids if token_id < FIRST_FRAME_ID]
    if words and not 0 <= min(words) <= max(words) < model.vocab_size:
        raise InvalidRequest(f"Token ids lie between 0 and {model.vocab_size - 1}.", param="prompt")


def _check_reasoning(request: TokenRequest) -> None:
    """Refuse settings under which the end of reasoning could not be sampled at its budget."""
    rules, sampling = request.reasoning, request.sampling
    if rules is None or rules.max_tokens is None or not sampling.min_tokens:
        return
    if {*rules.closes, *rules.ending} & set(sampling.stop_token_ids):
        raise InvalidRequest(
            "stop_token_ids has a token that ends reasoning, and min_tokens keeps it from being"
            " sampled, but thinking_budget needs it: leave one of the three out.",
            param="min_tokens",
        )

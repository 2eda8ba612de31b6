"""The sampling parameters of a request, and the bounds of each field.

Owns the parameters and their validation. Knows nothing of tensors or HTTP.
"""

from __future__ import annotations

import math

import msgspec

from triptych.core.errors import InvalidRequest
from triptych.core.limits import (
    MAX_ABS_LOGIT_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    SAMPLING_RANGES,
)

__all__ = ["MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_SAMPLES", "MAX_STOP_STRINGS", "SamplingParams"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one row. Immutable for the lifetime of its job.

    `seed`, the row's `sample_index` and the token's position key every random number, so a row's
    output never depends on its batch mates. `top_logprobs` is the number of alternatives
    reported per token (`None`: no log-probabilities at all). `stop_token_ids` holds every id
    that ends the row, the model's end-of-text ids included unless the caller ignores them. With
    `returns_state` no token is sampled: the row ends with the final state of its last position, or
    with its scores of `state_token_ids`, if any.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    sample_index: int = 0
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    returns_state: bool = False
    state_token_ids: tuple[int, ...] = ()

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the probabilities of the next one."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequest`, naming the field, if any value is out of range."""
        for name, (low, high) in SAMPLING_RANGES.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(f"{name} must be between {low} and {high}.", param=name)
        if self.repetition_penalty <= 0:
            raise InvalidRequest("repetition_penalty must be above 0.", param="repetition_penalty")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries.", param="logit_bias"
            )
        if any(not abs(bias) <= MAX_ABS_LOGIT_BIAS for _, bias in self.logit_bias):
            raise InvalidRequest(
                f"logit_bias values lie between {-MAX_ABS_LOGIT_BIAS} and {MAX_ABS_LOGIT_BIAS}.",
                param="logit_bias",
            )
        biased = [token for token, _ in self.logit_bias]
        others = (*self.stop_token_ids, *self.state_token_ids)
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", others)):
            if any(not 0 <= token < vocab_size for token in tokens):
                raise InvalidRequest(f"Token ids lie between 0 and {vocab_size - 1}.", param=name)

"""The sizes of requests that one model can serve.

Owns the bounds that follow from its context, its pages and the options. Knows no other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ContextLengthExceeded, InvalidRequest
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """The bounds of requests: `max_length` is that of prompt plus output."""

    pool: PagePool
    options: ScheduleOptions
    max_length: int

    @property
    def max_prompt_tokens(self) -> int:
        """The longest possible prompt."""
        page_size, limit = self.pool.page_size, self.options.max_batch_total_tokens
        most = self.max_length - 1
        return min(most, limit // page_size * page_size) if limit else most

    def max_outputs(self, request: TokenRequest) -> int:
        """The most tokens the request may yield. Raises `RequestError` if it can never run."""
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if num_prompt >= self.max_length:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt} tokens; this model takes {self.max_length} tokens,"
                " prompt and output together."
            )
        max_outputs = min(request.sampling.max_tokens, self.max_length - num_prompt)
        capacity = self.pool.num_pages * self.pool.page_size
        if num_prompt + max_outputs - 1 > capacity:
            raise ContextLengthExceeded(
                f"Prompt and output may take {num_prompt + max_outputs} tokens; the KV cache holds"
                f" {capacity}. Ask for fewer tokens (max_tokens), or enlarge the cache."
            )
        limit = self.options.max_batch_total_tokens
        if limit and self.pool.num_pages_for(num_prompt) * self.pool.page_size > limit:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt} tokens; max_batch_total_tokens allows {limit},"
                " counted in whole pages."
            )
        return max_outputs

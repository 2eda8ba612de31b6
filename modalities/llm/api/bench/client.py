"""One streamed request to an OpenAI-compatible server, with the times that matter.

Owns the wire and the clock. Knows nothing of load or statistics.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx
import msgspec

from triptych.core.errors import ConfigError

Prompt: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""A text, or the messages of a conversation."""

_EXTRAS: tuple[Mapping[str, Any], ...] = (
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True},
    {},
)
"""Fields that some servers refuse, the most useful first."""

_PIECES = ("content", "reasoning_content", "reasoning")
"""Fields of a delta with generated text; servers name that of reasoning differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServer:
    """A server under test. `body` is added to each request, `key` is sent as bearer token."""

    label: str
    base_url: str
    model: str = ""
    endpoint: str = "chat"
    body: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def path(self) -> str:
        """The path of requests."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def request(self, prompt: Prompt, *, max_tokens: int) -> dict[str, Any]:
        """The JSON of one request, greedy and streamed."""
        asked: dict[str, Any] = {"prompt": prompt}
        if self.endpoint == "chat":
            is_text = isinstance(prompt, str)
            asked = {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}
        common = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        return {**asked, **common, **self.body}


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The result of one request. Times are seconds of one monotonic clock.

    `arrivals_s` are the times of the pieces of text. Token counts are the server's if it reports
    them, else pieces of text; `error` is a short kind ("HTTP 429", "timeout"), empty for none.
    """

    sent_s: float
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first piece of text."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces of text."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.ended_s - self.sent_s


async def measure(
    client: httpx.AsyncClient, target: BenchServer, prompt: Prompt, *, max_tokens: int
) -> RequestRecord:
    """Send one request and follow its stream. Failures end up in the sample, never raised."""
    body = msgspec.json.encode(target.request(prompt, max_tokens=max_tokens))
    sample = RequestRecord(sent_s=time.perf_counter())
    try:
        url = target.base_url + target.path
        headers = {**target.headers, "content-type": "application/json"}
        async with client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code == 200:
                await _follow(response, sample)
            else:
                sample.error = f"HTTP {response.status_code}"
    except httpx.TimeoutException:
        sample.error = "timeout"
    except httpx.TransportError:
        sample.error = "connection"
    except msgspec.DecodeError:
        sample.error = "malformed stream"
    sample.ended_s = time.perf_counter()
    if not sample.error and not sample.arrivals_s:
        sample.error = "empty answer"
    return sample


async def _follow(response: httpx.Response, sample: RequestRecord) -> None:
    is_ended = False  # by [DONE], or by a finish reason from servers that do not send it
    async for event in _events(response):
        if event == "[DONE]":
            is_ended = True
        else:
            is_ended |= _note(msgspec.json.decode(event), sample)
    if not is_ended and not sample.error:
        sample.error = "cut stream"


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def _note(event: Any, sample: RequestRecord) -> bool:
    """Record one event in `sample`; returns whether it has a finish reason."""
    if not isinstance(event, dict):
        raise msgspec.DecodeError("an event is not an object")
    if "error" in event:
        sample.error = "error event"
    choices = event.get("choices") or ()
    for choice in choices:
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in _PIECES):
            sample.arrivals_s.append(time.perf_counter())
            sample.num_output_tokens = max(sample.num_output_tokens, len(sample.arrivals_s))
    usage = event.get("usage")
    if usage:
        sample.num_prompt_tokens = usage.get("prompt_tokens") or 0
        sample.num_output_tokens = usage.get("completion_tokens") or sample.num_output_tokens
        details = usage.get("prompt_tokens_details") or {}
        sample.num_cached_tokens = details.get("cached_tokens") or 0
    return any(choice.get("finish_reason") for choice in choices)


async def find_model(client: httpx.AsyncClient, target: BenchServer) -> str:
    """The first model in a server's list. Raises `ConfigError` if there is no list."""
    try:
        response = await client.get(f"{target.base_url}/v1/models", headers=target.headers)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{target.base_url} does not list its models ({type(error).__name__}); is it running?"
            " Name the model with --model if it is."
        ) from error


async def negotiate(client: httpx.AsyncClient, target: BenchServer) -> BenchServer:
    """`target` with the extra fields that it accepts: usage in the stream, EOS ignored.

    Raises `ConfigError` if even a plain request fails.
    """
    for extra in _EXTRAS:
        candidate = dataclasses.replace(target, body={**extra, **target.body})
        sample = await measure(client, candidate, "Say hello.", max_tokens=2)
        if not sample.error:
            return candidate
    name = target.label or target.model
    raise ConfigError(f"{name}: a plain request to {target.path} fails: {sample.error}.")


async def tokens_per_word(
    client: httpx.AsyncClient, target: BenchServer, text: str
) -> float | None:
    """Tokens per word of `text`, by the server's `/tokenize`; `None` if it has none."""
    try:
        body = {"model": target.model, "prompt": text}
        url = f"{target.base_url}/tokenize"
        response = await client.post(url, json=body, headers=target.headers)
        response.raise_for_status()
        return len(response.json()["tokens"]) / len(text.split())
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None

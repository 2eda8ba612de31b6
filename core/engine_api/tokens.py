"""The messages of token generation between API and engine: a request, and its deltas.

Owns the wire types of every model that generates tokens (chat, vision chat, speech tokens). No text
is sent: the API process tokenizes and detokenizes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.engine_api.frames import StepCodes
from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]
CacheAction = Literal["", "pin", "unpin", "drop", "clear"]


class ReasoningRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that delimit a row's reasoning, and its token budget.

    With `open_at_start` the prompt ends inside the reasoning. Otherwise the answer may begin with
    `opens`, after any `blanks`; with `reopen`, those tokens open reasoning anywhere. Each of
    `closes` ends it. After `max_tokens` of reasoning (`None`: no limit) the tokens `ending` are
    forced. The row's grammar applies after reasoning that was `open_at_start`.
    """

    opens: tuple[int, ...]
    closes: tuple[int, ...]
    ending: tuple[int, ...]
    max_tokens: int | None = None
    blanks: tuple[int, ...] = ()
    open_at_start: bool = False
    reopen: bool = False


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tokens"):
    """One row to generate: `n` samples of a prompt are `n` requests with their own index.

    `prompt_frames` are the codes of the frame ids in the prompt, in order, for models whose steps
    yield frames of codes (see `core.engine_api.frames`): an id alone does not determine its codes.
    `contents` fill the positions that have their ids, in order of position (see
    `core.engine_api.prompt_content`). Sampled tokens follow `grammar`, if any (see `core.grammar`),
    and the rules of `reasoning`. `adapter` is the digest of the adapter's content at
    `adapter_place`, a file that the engine can read; both are empty without an adapter.

    With a `cache_action` nothing is computed: the prompt's cached pages are kept, given up or
    dropped, or with `clear` all pages are. The only delta then has the tokens that had pages.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    prompt_frames: tuple[StepCodes, ...] = ()
    contents: tuple[PromptContent, ...] = ()
    grammar: str = ""
    reasoning: ReasoningRules | None = None
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    adapter_place: str = ""
    cache_action: CacheAction = ""


class AdapterLoad(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load an adapter before the first request that needs it; a job without outputs."""

    digest: str
    place: str


class AdapterDrop(msgspec.Struct, frozen=True, kw_only=True, tag="drop_adapter"):
    """Drop an adapter once no request uses it; a job without outputs that ends then."""

    digest: str


TextJob = TokenRequest | AdapterLoad | AdapterDrop
"""The jobs of a text model."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of one token, and the most likely alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(msgspec.Struct, kw_only=True, omit_defaults=True, tag="delta", gc=False):
    """One step's output for a sequence: the runner sets the tokens, the scheduler the rest.

    `is_finite` is false if the logits held NaN. Where a step yields several codes at once, they are
    in `codes`, and `token_ids` holds their frame id. A model that follows its prompt sets `place`:
    how many of the prompt's ids are spoken before this step. The last delta of a job has
    `finish_reason`.

    `stop_token_id` is the stop or EOS token that ended the job; it is not in `token_ids`, but the
    last of `logprobs` belongs to it. `prompt_logprobs` comes with the first delta, if requested;
    the first prompt token has no entry. `state` is the last position's final state, little-endian
    float32, the only output of a request with `returns_state`. `num_cached_contents` counts
    contents whose features were in the cache.
    """

    token_ids: tuple[int, ...] = ()
    codes: StepCodes = ()
    place: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    state: bytes = b""
    is_finite: bool = True
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_cached_contents: int = 0
    num_preemptions: int = 0

"""The messages of token generation between API and engine: a request, and its deltas.

Owns the wire types of every model that writes tokens (chat, vision chat, speech tokens). Text
never crosses: the API process tokenizes and detokenizes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.engine_api.frames import StepCodes
from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


class ReasoningRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tokens a row's reasoning lies between, and how many they may be.

    The prompt ends within them if they are `open_at_start`. Else the answer may begin with `opens`,
    behind any `blanks`; where they `reopen`, those tokens open reasoning wherever they stand. Each
    of `closes` ends them. After `max_tokens` of reasoning (`None`: of any number) come `ending`,
    sampled from nothing else. What the row's grammar prescribes begins where reasoning that was
    `open_at_start` end.
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

    `prompt_frames` are the codes of the frame ids in the prompt, in their order: models whose
    steps yield frames of codes (see `core.engine_api.frames`) cannot know a frame by its id alone.
    `contents` fill the positions that have their ids, in order of position (see
    `core.engine_api.prompt_content`). What is sampled follows `grammar`, if there is one (see
    `core.grammar`), and what `thinking` says.
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


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token, and the most likely alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenDelta(msgspec.Struct, kw_only=True, omit_defaults=True, tag="delta"):
    """What one step added to a sequence: a runner says what was sampled, its scheduler the rest.

    `is_finite` is false where the logits held NaN. Where a step yields several codes at once, they
    are in `codes`, and `token_ids` holds the frame id that names them. The last delta of a job
    carries `finish_reason`.

    `stop_token_id` is the stop or EOS token that ended the job (it is not in `token_ids`, but the
    last of `logprobs` is its).
    `prompt_logprobs` comes with the first delta of a request that asked for it; the first prompt
    token has no entry. `state` is all that a request gets that asked for its final state: its last
    position's, little-endian float32.
    `num_cached_contents` of the request's contents have not been encoded for it.
    """

    token_ids: tuple[int, ...] = ()
    codes: StepCodes = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    state: bytes = b""
    is_finite: bool = True
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_cached_contents: int = 0
    num_preemptions: int = 0

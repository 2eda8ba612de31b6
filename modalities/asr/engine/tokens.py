"""Writing the text of a window token by token.

Owns sampling one token, and the loop around it. The family computes the logits, masks them and says
which tokens end a text. Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import NonFinite
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.randomness import stream_key, uniforms


def no_number() -> NonFinite:
    """The error of a network that computed NaN or infinity."""
    return NonFinite("The model computed no finite numbers for this sound.")


class SeededSampler:
    """Samples the tokens of one recording. Each draw is keyed by the seed and its number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_sampled = 0

    def sample(self, logits_V: Tensor, temperature: float) -> tuple[int, float]:
        """Sample a token; returns it with its log-probability at temperature 1.

        Waits for the device, because the next mask depends on the token. Raises `NonFinite` if the
        log-probability is not finite.
        """
        if temperature == 0:
            token_1 = logits_V.argmax(0, keepdim=True)
        else:
            key = np.array([stream_key(self._seed, 0)], np.uint64)
            sample = float(uniforms(key, np.array([self._num_sampled], np.int64))[0])
            below_V = (logits_V - logits_V.max()).double()  # tiny temperatures would overflow
            mass_V = (below_V / temperature).softmax(0).cumsum(0)
            token_1 = torch.searchsorted(mass_V, sample * mass_V[-1:], right=True)
            token_1 = token_1.clamp(max=len(mass_V) - 1)  # NaN would give an index past the end
        self._num_sampled += 1
        logprob_1 = logits_V.index_select(0, token_1) - logits_V.logsumexp(0)
        token_id, logprob = HostCopy(torch.cat((token_1.double(), logprob_1.double()))).get()
        if not logprob.isfinite():
            raise no_number()
        return int(token_id), float(logprob)


@dataclass(frozen=True, slots=True)
class Written:
    """A window's tokens without the end token, which came if `has_ended`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end_logprob: float
    has_ended: bool

    @property
    def avg_logprob(self) -> float:
        """The mean over the tokens and the end token."""
        return (sum(self.logprobs) + self.end_logprob) / (len(self.token_ids) + 1)


class ExpectedTokens:
    """Tokens that a text may begin with: all are fed at once as soon as the first is written.

    `feed` takes tokens and returns the logits [T, V] after each; `keep` drops all but the first so
    many of them. No token changes, but for the last bits of logits that are computed together.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        feed: Callable[[Sequence[int]], Tensor],
        keep: Callable[[int], None],
    ) -> None:
        self._ids = tuple(token_ids)
        self._feed, self._keep = feed, keep
        self._logits_TV: Tensor | None = None

    def logits(self, token_ids: Sequence[int]) -> Tensor | None:
        """The logits [V] after the tokens so far; none once they are others, or further."""
        at = len(token_ids) - 1
        if token_ids[at:] != list(self._ids[at : at + 1]):
            if at < len(self._ids) and self._logits_TV is not None:
                self._keep(at)
            self._ids = ()
            return None
        if self._logits_TV is None:
            self._logits_TV = self._feed(self._ids)
        return self._logits_TV[at]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a window is written.

    `feed` takes a token and returns the next logits [V] (float32). `choose` picks a token from
    logits, after the tokens so far. A stage computes `tokens_per_stage`.
    """

    feed: Callable[[int], Tensor]
    choose: Callable[[Tensor, list[int]], tuple[int, float]]
    end_ids: Collection[int]
    max_tokens: int
    tokens_per_stage: int
    expected: ExpectedTokens | None = None

    def write(self, logits_V: Tensor) -> Generator[Stage, None, Written]:
        """Write from the first token's logits to an end token or the bound."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        while len(token_ids) < self.max_tokens:
            if token_ids:
                if len(token_ids) % self.tokens_per_stage == 0:
                    yield Stage("decode", self.tokens_per_stage)
                known_V = self.expected.logits(token_ids) if self.expected else None
                logits_V = self.feed(token_ids[-1]) if known_V is None else known_V
            token_id, logprob = self.choose(logits_V, token_ids)
            if token_id in self.end_ids:
                return Written(tuple(token_ids), tuple(logprobs), logprob, True)
            token_ids.append(token_id)
            logprobs.append(logprob)
        return Written(tuple(token_ids), tuple(logprobs), 0.0, False)

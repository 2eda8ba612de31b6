"""Sampling in a model that is divided over ranks: rank 0 samples and broadcasts its tokens.

Owns how a step's tokens reach every rank. Ranks cannot diverge, whatever the last bit of a sample
depends on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.text_head import TokenSampler, TokenSamples


class LeadingSampler:
    """Implements `TokenSampler` on rank 0."""

    def __init__(self, sampler: TokenSampler, group: RankGroup) -> None:
        self._sampler, self._group = sampler, group

    def bind(self, row: TokenRow) -> None:
        """Bind the row in the wrapped sampler."""
        self._sampler.bind(row)

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
        drafts: Sequence[int] = (),
        relaxed: Sequence[bool] = (),
    ) -> TokenSamples:
        """Sample, and broadcast the tokens."""
        sampled = self._sampler.sample(logits_BV, slots, positions, allowed, drafts, relaxed)
        self._group.broadcast(sampled.token_ids_B)
        return sampled


class FollowingSampler:
    """Implements `TokenSampler` on the ranks that receive their tokens."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def bind(self, row: TokenRow) -> None:
        """Do nothing: sampling parameters are used on rank 0 only."""

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
        drafts: Sequence[int] = (),
        relaxed: Sequence[bool] = (),
    ) -> TokenSamples:
        """Receive the tokens that rank 0 sampled."""
        ids_B = torch.empty(len(slots), dtype=torch.int64, device=logits_BV.device)
        return _BroadcastTokens(self._group.broadcast(ids_B))


class _BroadcastTokens:
    """Implements `TokenSamples`: used for the next step only."""

    def __init__(self, token_ids_B: torch.Tensor) -> None:
        self.token_ids_B = token_ids_B

    def to_results(self) -> tuple[TokenDelta, ...]:
        """Never called: results are read on rank 0."""
        return ()

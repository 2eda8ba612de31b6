"""Sampling in a model that is divided over ranks: rank 0 samples, the others are told.

Owns how a step's tokens get to every rank. So ranks cannot come to differ, whatever a sample's last
bit follows from.
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
        """As the sampler behind it."""
        self._sampler.bind(row)

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
    ) -> TokenSamples:
        """Sample, and tell the others."""
        sampled = self._sampler.sample(logits_BV, slots, positions, allowed)
        self._group.broadcast(sampled.token_ids_B)
        return sampled


class FollowingSampler:
    """Implements `TokenSampler` on the other ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def bind(self, row: TokenRow) -> None:
        """What a row is sampled by is rank 0's business."""

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
    ) -> TokenSamples:
        """What rank 0 sampled."""
        ids_B = torch.empty(len(slots), dtype=torch.int64, device=logits_BV.device)
        return _ToldTokens(self._group.broadcast(ids_B))


class _ToldTokens:
    """Implements `TokenSamples`: for the next step alone."""

    def __init__(self, token_ids_B: torch.Tensor) -> None:
        self.token_ids_B = token_ids_B

    def to_results(self) -> tuple[TokenDelta, ...]:
        """Nobody asks another rank than 0 for results."""
        return ()

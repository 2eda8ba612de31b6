"""The rows of a step as the device samples them.

Owns the two ways to sample greedy and random rows together: by groups in a step that runs eagerly,
or every row both ways in a captured step. Knows nothing of slots' other settings or of kernels.

Shapes: B rows of the step, S slots, V vocabulary, R rows of a group, F filtered rows, Q codes of a
frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from triptych.core.runtime.sampling.filters import nucleus_thresholds, sample


@dataclass(frozen=True, kw_only=True)
class StepRows(ABC):
    """The slots of a step's rows, and a random number for each row unless all are greedy.

    With `has_floor`, a filter of some row drops unlikely tokens.
    """

    slots_B: torch.Tensor
    uniform_B: torch.Tensor | None
    has_floor: bool

    def for_code(self, code: int) -> Self:
        """The rows for one code of a frame, where `uniform_B` is `[Q, B]`."""
        return replace(self, uniform_B=None if self.uniform_B is None else self.uniform_B[code])

    def repeated(self, num_codes: int) -> Self:
        """Each row `num_codes` times in sequence, with one random number of `[Q, B]` each."""
        uniform_QB = self.uniform_B
        return replace(
            self,
            slots_B=self.slots_B.repeat_interleave(num_codes),
            uniform_B=None if uniform_QB is None else uniform_QB.t().flatten(),
        )

    def sample(self, logits_BV: torch.Tensor, shape_S4: torch.Tensor) -> torch.Tensor:
        """One token id per row, by each slot's temperature, top-k, top-p and min-p."""
        if self.uniform_B is None:
            return logits_BV.argmax(-1)
        return self._sample_mixed(logits_BV, shape_S4[self.slots_B], self.uniform_B)

    @abstractmethod
    def _sample_mixed(
        self, logits_BV: torch.Tensor, shape_B4: torch.Tensor, uniform_B: torch.Tensor
    ) -> torch.Tensor:
        """As `sample`, where some rows are random."""


@dataclass(frozen=True, kw_only=True)
class GroupedRows(StepRows):
    """Rows of an eager step: `groups` has the indexes of the rows that need an operation.

    Groups without rows are absent. `greedy` and `random` exist only if the step has rows of both
    kinds. The indexes of `filtered` count the random rows only.
    """

    groups: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def repeated(self, num_codes: int) -> Self:
        """See `StepRows`; the groups have all repetitions of their rows."""
        order_Q = torch.arange(num_codes, device=self.slots_B.device)
        groups = {
            name: (index_R[:, None] * num_codes + order_Q).flatten()
            for name, index_R in self.groups.items()
        }
        return replace(super().repeated(num_codes), groups=groups)

    def _sample_mixed(
        self, logits_BV: torch.Tensor, shape_B4: torch.Tensor, uniform_B: torch.Tensor
    ) -> torch.Tensor:
        filtered_F = self.groups.get("filtered")
        if "random" not in self.groups:
            return _sample_random(logits_BV, shape_B4, uniform_B, filtered_F, self.has_floor)
        greedy_R, random_R = self.groups["greedy"], self.groups["random"]
        ids_B = torch.empty_like(self.slots_B)
        ids_B[greedy_R] = logits_BV[greedy_R].argmax(-1)
        ids_B[random_R] = _sample_random(
            logits_BV[random_R], shape_B4[random_R], uniform_B[random_R], filtered_F, self.has_floor
        )
        return ids_B


@dataclass(frozen=True, kw_only=True)
class CapturedRows(StepRows):
    """Rows of a captured step, whose tensor shapes depend only on the number of rows.

    All rows are sampled both ways, and `is_greedy_B` selects. With `has_floor` all are filtered.
    """

    is_greedy_B: torch.Tensor

    def repeated(self, num_codes: int) -> Self:
        """See `StepRows`; also repeats `is_greedy_B`."""
        is_greedy_B = self.is_greedy_B.repeat_interleave(num_codes)
        return replace(super().repeated(num_codes), is_greedy_B=is_greedy_B)

    def _sample_mixed(
        self, logits_BV: torch.Tensor, shape_B4: torch.Tensor, uniform_B: torch.Tensor
    ) -> torch.Tensor:
        every = slice(None) if self.has_floor else None
        sampled_B = _sample_random(logits_BV, shape_B4, uniform_B, every, self.has_floor)
        return torch.where(self.is_greedy_B, logits_BV.argmax(-1), sampled_B)


def _sample_random(
    logits_RV: torch.Tensor,
    shape_R4: torch.Tensor,
    uniform_R: torch.Tensor,
    filtered_F: torch.Tensor | slice | None,
    has_floor: bool,
) -> torch.Tensor:
    return sample(kept_probs(logits_RV, shape_R4, filtered_F, has_floor), uniform_R)


def kept_probs(
    logits_RV: torch.Tensor,
    shape_R4: torch.Tensor,
    filtered_F: torch.Tensor | slice | None,
    has_floor: bool,
) -> torch.Tensor:
    """The probabilities of tokens that filters keep, which need not add up to 1; 0 of others."""
    temperature_R1, top_k_R1, top_p_R1, min_p_R1 = shape_R4[:, :, None].unbind(1)
    probs_RV = torch.softmax(logits_RV / temperature_R1, -1)
    if has_floor:
        floor_R1 = min_p_R1 * probs_RV.amax(-1, keepdim=True)
        if filtered_F is not None:
            nucleus_F = nucleus_thresholds(
                probs_RV[filtered_F], top_k_R1[filtered_F, 0], top_p_R1[filtered_F, 0]
            )
            floor_R1[filtered_F, 0] = torch.maximum(floor_R1[filtered_F, 0], nucleus_F)
        probs_RV = torch.where(probs_RV >= floor_R1, probs_RV, 0.0)
    return probs_RV

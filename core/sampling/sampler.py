"""Draws one token per row of a step, vectorised over the batch.

Owns the per-slot sampling state and the order of things. Knows nothing of models, pages or jobs.

A step's logits pass through, each only for the rows that need it:

1. `logit_bias`, 2. `min_tokens` (stop tokens forbidden until enough output), 3. repetition, then
frequency and presence penalties, 4. temperature, 5. top-k, 6. top-p, 7. min-p, 8. the draw.

Below a temperature of 1e-5 the row is greedy: the likeliest token after step 3 (the lowest id
among equals). So it is with `top_k=1` or `top_p=0`. Which rows need what is decided on the host
from flags set when a slot is bound, so a step never waits for the device. Every operation works
on one row alone: no row's token depends on its batch mates.

Shapes: B rows of the step, S slots, V vocabulary, R rows of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.core.kernels.native.library import NativeKernels
from triptych.core.limits import MAX_LOGPROBS
from triptych.core.plan import SlotStart, TokenRowResult
from triptych.core.sampling.filters import draw, nucleus_thresholds
from triptych.core.sampling.host_copy import HostCopy
from triptych.core.sampling.logprobs import Logprobs
from triptych.core.sampling.processors import Penalties, SparseEdits
from triptych.core.sampling.randomness import stream_key, uniforms
from triptych.core.sampling_params import SamplingParams
from triptych.core.tokens import TokenLogprob

_MIN_TEMPERATURE = 1e-5

_SLOT = np.dtype(
    [
        ("key", np.uint64),
        ("is_greedy", np.bool_),
        ("is_filtered", np.bool_),
        ("has_min_p", np.bool_),
        ("has_bias", np.bool_),
        ("has_penalty", np.bool_),
        ("first_free_position", np.int64),
        ("num_top", np.int64),
    ]
)
"""What the host knows of a slot. Before `first_free_position` stop tokens are forbidden; `num_top`
is -1 where no log-probabilities are wanted."""

Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step drew. The device tensors feed the next step; the host copy is under way."""

    token_ids_B: torch.Tensor
    is_finite_B: torch.Tensor
    _vocab_size: int
    _ids: HostCopy
    _num_top: tuple[int, ...]
    _logprobs: Logprobs | None

    def to_results(self) -> tuple[TokenRowResult, ...]:
        """Wait for the copies. A row whose id is out of range counts as not finite."""
        return tuple(
            TokenRowResult(token_ids=(token_id,), logprobs=entries)
            if 0 <= token_id < self._vocab_size
            else TokenRowResult(is_finite=False)
            for token_id, entries in zip(self._ids.get().tolist(), self._entries(), strict=True)
        )

    def _entries(self) -> list[tuple[TokenLogprob, ...]]:
        if self._logprobs is None:
            return [()] * len(self._num_top)
        wanted = [count for count in self._num_top if count >= 0]
        entries = iter(self._logprobs.to_entries(wanted))
        return [(next(entries),) if count >= 0 else () for count in self._num_top]


class Sampler:
    """Sampling state of one model's batch slots. Used from one thread."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_batch_size: int,
        device: torch.device,
        native: NativeKernels | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._native = native
        self._slots = np.zeros(max_batch_size, _SLOT)
        self._shape_S4 = torch.zeros(max_batch_size, 4, device=device)
        self._bias = SparseEdits(max_batch_size, device)
        self._stops = SparseEdits(max_batch_size, device)
        self._penalties = Penalties(vocab_size, max_batch_size, device)

    def bind(self, start: SlotStart) -> None:
        """Take a slot for a row: its parameters, and its history where penalties need one."""
        sampling = start.sampling
        self._slots[start.slot] = _flags(start)
        self._shape_S4[start.slot] = torch.tensor(
            (
                0.0 if self._slots["is_greedy"][start.slot] else sampling.temperature,
                min(sampling.top_k, self._vocab_size),
                sampling.top_p,
                sampling.min_p,
            )
        )
        if sampling.logit_bias:
            self._bias.bind(start.slot, sampling.logit_bias)
        if sampling.min_tokens:
            self._stops.bind(start.slot, [(t, -torch.inf) for t in sampling.stop_token_ids])
        if _has_penalty(sampling):
            self._penalties.bind(
                start.slot,
                (
                    sampling.repetition_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                ),
                start.history_ids[: start.num_prompt_tokens],
                start.history_ids[start.num_prompt_tokens :],
            )

    def sample(
        self, logits_BV: torch.Tensor, slots: Sequence[int], positions: Sequence[int]
    ) -> SampledTokens:
        """Draw one token per row.

        `slots` are the rows' bound slots, each at most once; `positions` the absolute positions
        of the tokens being drawn. Logits of any float type; they are not changed.
        """
        rows = self._slots[np.asarray(slots)]
        position_B = np.asarray(positions, np.int64)
        slots_B = self._to_device(np.asarray(slots, np.int64))
        logits_BV = logits_BV.float()
        edited_BV = self._edit(logits_BV, rows, slots_B, position_B)
        uniform_B = self._uniforms(rows, position_B)
        token_ids_B, is_finite_B = self._draw(logits_BV, rows, slots_B, uniform_B, edited_BV)
        if rows["has_penalty"].any():
            index = self._index(rows["has_penalty"])
            self._penalties.count(slots_B[index], token_ids_B[index])
        return SampledTokens(
            token_ids_B,
            is_finite_B,
            self._vocab_size,
            HostCopy(torch.where(is_finite_B, token_ids_B, -1)),
            tuple(rows["num_top"].tolist()),
            self._logprobs(logits_BV, token_ids_B, rows["num_top"]),
        )

    def frame_sampler(
        self, slots: Sequence[int], positions: Sequence[int], num_codes: int
    ) -> FrameSampler:
        """For rows that draw `num_codes` codes at one position; else as `sample`.

        Temperature, top-k, top-p and min-p count; what edits logits does not.
        """
        rows = self._slots[np.asarray(slots)]
        first_B = np.asarray(positions, np.int64) * num_codes
        uniform_QB = self._uniforms(rows, first_B + np.arange(num_codes)[:, None])
        slots_B = self._to_device(np.asarray(slots, np.int64))
        return FrameSampler(self, rows, slots_B, uniform_QB)

    def _edit(
        self,
        logits_BV: torch.Tensor,
        rows: Rows,
        slots_B: torch.Tensor,
        position_B: NDArray[np.int64],
    ) -> torch.Tensor | None:
        """The logits after steps 1 to 3, if any row asks for one."""
        is_barred = position_B < rows["first_free_position"]
        is_edited = rows["has_bias"] | is_barred | rows["has_penalty"]
        if not is_edited.any():
            return None
        edited_BV = logits_BV.clone()
        for apply, is_wanted in (
            (self._bias.apply, rows["has_bias"]),
            (self._stops.apply, is_barred),
            (self._penalties.apply, rows["has_penalty"]),
        ):
            if is_wanted.any():
                index = self._index(is_wanted)
                edited_BV[index] = apply(edited_BV[index], slots_B[index])
        return edited_BV

    def _draw(
        self,
        logits_BV: torch.Tensor,
        rows: Rows,
        slots_B: torch.Tensor,
        uniform_B: torch.Tensor | None,
        edited_BV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, by the edited logits where there are any, and which rows' logits are finite."""
        if logits_BV.is_cuda:
            from triptych.core.kernels.triton.sampling import sample_rows

            ids_B, is_finite_B = sample_rows(
                logits_BV, edited_BV, None, self._shape_S4, slots_B, uniform_B
            )
            return ids_B, is_finite_B
        logits_BV = logits_BV.float()
        is_finite_B = torch.isfinite(logits_BV.sum(-1))
        scores_BV = logits_BV if edited_BV is None else edited_BV
        return self._draw_by_kind(scores_BV, rows, slots_B, uniform_B), is_finite_B

    def _draw_by_kind(
        self,
        logits_BV: torch.Tensor,
        rows: Rows,
        slots_B: torch.Tensor,
        uniform_B: torch.Tensor | None,
    ) -> torch.Tensor:
        is_greedy = rows["is_greedy"]
        if uniform_B is None:
            return logits_BV.argmax(-1)
        is_random = ~is_greedy
        if is_random.all():
            return self._draw_random(logits_BV, rows, slots_B, uniform_B)
        greedy, random = self._index(is_greedy), self._index(is_random)
        token_ids_B = torch.empty_like(slots_B)
        token_ids_B[greedy] = logits_BV[greedy].argmax(-1)
        token_ids_B[random] = self._draw_random(
            logits_BV[random], rows[is_random], slots_B[random], uniform_B[random]
        )
        return token_ids_B

    def _uniforms(self, rows: Rows, positions: NDArray[np.int64]) -> torch.Tensor | None:
        """A number per row (last axis) and position; `None` where every row is greedy."""
        if rows["is_greedy"].all():
            return None
        return self._to_device(uniforms(rows["key"], positions))

    def _draw_random(
        self, logits_RV: torch.Tensor, rows: Rows, slots_R: torch.Tensor, uniform_R: torch.Tensor
    ) -> torch.Tensor:
        temperature_R1, top_k_R1, top_p_R1, min_p_R1 = self._shape_S4[slots_R, :, None].unbind(1)
        probs_RV = torch.softmax(logits_RV / temperature_R1, -1)
        if (rows["is_filtered"] | rows["has_min_p"]).any():
            floor_R1 = min_p_R1 * probs_RV.amax(-1, keepdim=True)
            if rows["is_filtered"].any():
                index = self._index(rows["is_filtered"])
                nucleus_R = nucleus_thresholds(
                    probs_RV[index], top_k_R1[index, 0], top_p_R1[index, 0], self._native
                )
                floor_R1[index, 0] = torch.maximum(floor_R1[index, 0], nucleus_R)
            probs_RV = torch.where(probs_RV >= floor_R1, probs_RV, 0.0)
        return draw(probs_RV, uniform_R)

    def _logprobs(
        self, logits_BV: torch.Tensor, token_ids_B: torch.Tensor, num_top: NDArray[np.int64]
    ) -> Logprobs | None:
        is_wanted = num_top >= 0
        if not is_wanted.any():
            return None
        index = self._index(is_wanted)
        # The same number for every row, so that ties at the end fall alike in any batch.
        count = MAX_LOGPROBS if num_top.max() > 0 else 0
        return Logprobs.of(logits_BV[index], token_ids_B[index], count)

    def _index(self, mask: NDArray[np.bool_]) -> torch.Tensor:
        return self._to_device(np.flatnonzero(mask))

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.float64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class FrameSampler:
    """Draws the codes of one frame for some rows, one code of all rows at a time.

    `slots_B` and `is_finite_B` (no logits so far held NaN or infinities) are on the device.
    """

    __slots__ = ("_rows", "_sampler", "_uniform_QB", "is_finite_B", "slots_B")

    def __init__(
        self,
        sampler: Sampler,
        rows: Rows,
        slots_B: torch.Tensor,
        uniform_QB: torch.Tensor | None,
    ) -> None:
        self._sampler = sampler
        self._rows = rows
        self._uniform_QB = uniform_QB
        self.slots_B = slots_B
        self.is_finite_B = torch.ones_like(slots_B, dtype=torch.bool)

    def draw(self, logits_BV: torch.Tensor, code: int) -> torch.Tensor:
        """Ids of the `code`-th code of each row's frame, from logits of any float type."""
        uniform_B = None if self._uniform_QB is None else self._uniform_QB[code]
        ids_B, is_finite_B = self._sampler._draw(logits_BV, self._rows, self.slots_B, uniform_B)
        self.is_finite_B &= is_finite_B
        return ids_B

    def draw_all(self, logits_BQV: torch.Tensor) -> torch.Tensor:
        """All codes of each row's frame at once: `codes_BQ`."""
        num_rows, num_codes, _ = logits_BQV.shape
        uniform_QB = self._uniform_QB
        codes, is_finite = self._sampler._draw(
            logits_BQV.flatten(0, 1),
            np.repeat(self._rows, num_codes),
            self.slots_B.repeat_interleave(num_codes),
            None if uniform_QB is None else uniform_QB.t().flatten(),
        )
        self.is_finite_B &= is_finite.view(num_rows, num_codes).all(1)
        return codes.view(num_rows, num_codes)


def _flags(start: SlotStart) -> tuple[int | bool, ...]:
    """The `_SLOT` record of a row."""
    sampling = start.sampling
    is_greedy = (
        sampling.temperature < _MIN_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0
    )
    return (
        stream_key(sampling.seed, sampling.sample_index),
        is_greedy,
        sampling.top_k > 0 or sampling.top_p < 1,
        sampling.min_p > 0,
        bool(sampling.logit_bias),
        _has_penalty(sampling),
        start.num_prompt_tokens + sampling.min_tokens if sampling.stop_token_ids else 0,
        -1 if sampling.top_logprobs is None else sampling.top_logprobs,
    )


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )

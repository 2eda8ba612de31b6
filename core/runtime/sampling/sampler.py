"""Samples one token per row of a step, vectorized over the batch.

Owns the per-slot sampling state and the order of things. Knows nothing of models, pages or jobs.

A step's logits pass through, each only for the rows that need it:

1. `logit_bias`, 2. `min_tokens` (stop tokens forbidden until enough output), 3. repetition, then
frequency and presence penalties, 4. what a grammar allows, 5. temperature, 6. top-k, 7. top-p,
8. min-p, 9. the sample.

Below a temperature of 1e-5 the row is greedy: the likeliest token after step 4 (the lowest id
among equals). So it is with `top_k=1` or `top_p=0`. Which rows need what is decided on the host
from flags set when a slot is bound, so a step never waits for the device; what the device is told
of them goes over in one copy. Every operation works on one row alone: no row's token depends on its
batch mates.

Shapes: B rows of the step, S slots, V vocabulary, R rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob
from triptych.core.limits import MAX_LOGPROBS
from triptych.core.runtime.devices.upload import Numbers, Uploads
from triptych.core.runtime.kernels.native.arguments import RowEdits
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.sampling.filters import nucleus_thresholds, sample
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.logprobs import Logprobs
from triptych.core.runtime.sampling.processors import (
    Penalties,
    SparseEdits,
    keep_allowed,
    mask_words,
)
from triptych.core.runtime.sampling.randomness import stream_key, uniforms

LOGIT_BYTES = 56
"""What a sample holds for each logit of a row that asks for everything: counts, probabilities, and
their order with its running sums in float64."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceRows:
    """What the device is told of a step's rows: slots, a random number each, who needs what.

    `groups` are indexes of rows, by name; there is none where no row is in it. Without `random`
    rows beside `greedy` ones, all rows are what the first is. `filtered` counts among the random.
    Where shapes may not follow from who needs what, there are no groups: `is_greedy_B` says which
    samples are taken, and with `has_floor` all rows are filtered.
    """

    slots_B: torch.Tensor
    uniform_B: torch.Tensor | None
    has_floor: bool
    groups: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_greedy_B: torch.Tensor | None = None

    def for_code(self, code: int) -> _DeviceRows:
        """The rows, where `uniform_B` holds numbers of several codes: `[Q, B]`."""
        return replace(self, uniform_B=None if self.uniform_B is None else self.uniform_B[code])

    def repeated(self, num_codes: int) -> _DeviceRows:
        """Each row so many times in a row; its random numbers are those of its codes."""
        order_Q = torch.arange(num_codes, device=self.slots_B.device)
        is_greedy_B, uniform_QB = self.is_greedy_B, self.uniform_B
        return replace(
            self,
            slots_B=self.slots_B.repeat_interleave(num_codes),
            uniform_B=None if uniform_QB is None else uniform_QB.t().flatten(),
            groups={
                name: (index_R[:, None] * num_codes + order_Q).flatten()
                for name, index_R in self.groups.items()
            },
            is_greedy_B=None if is_greedy_B is None else is_greedy_B.repeat_interleave(num_codes),
        )


@dataclass(frozen=True, slots=True)
class FrameSampleKind:
    """What samples of a size have in common: as much as a captured step must know of its rows."""

    num_codes: int
    is_random: bool
    has_floor: bool


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled. The device tensors feed the next step; the host copy is under way."""

    token_ids_B: torch.Tensor
    is_finite_B: torch.Tensor
    _vocab_size: int
    _ids: HostCopy
    _num_top: tuple[int, ...]
    _logprobs: Logprobs | None

    def to_results(self) -> tuple[TokenDelta, ...]:
        """Wait for the copies. A row whose id is out of range counts as not finite."""
        return tuple(
            TokenDelta(token_ids=(token_id,), logprobs=entries)
            if 0 <= token_id < self._vocab_size
            else TokenDelta(is_finite=False)
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
        self._native = native if device.type == "cpu" else None
        self._uploads = Uploads(device)
        self._slots = np.zeros(max_batch_size, _SLOT)
        self._slots["is_greedy"] = True
        self._shape_S4 = torch.ones(max_batch_size, 4, device=device)
        self._bias = SparseEdits(max_batch_size, device, self._uploads)
        self._stops = SparseEdits(max_batch_size, device, self._uploads)
        self._penalties = Penalties(vocab_size, max_batch_size, device, self._uploads)

    def bind(self, row: TokenRow) -> None:
        """Take a slot for a row: its parameters, and its history where penalties need one."""
        sampling, slot = row.sampling, row.slot
        assert sampling is not None, "it takes its slot"
        self._slots[slot] = _flags(sampling, row.num_prompt_tokens)
        is_greedy = self._slots["is_greedy"][slot]
        shape = (
            max(sampling.temperature, _MIN_TEMPERATURE),
            1 if is_greedy else min(sampling.top_k, self._vocab_size),
            sampling.top_p,
            sampling.min_p,
        )
        (self._shape_S4[slot],) = self._uploads.send([np.array(shape, np.float64)])
        if sampling.logit_bias:
            self._bias.bind(slot, sampling.logit_bias)
        if sampling.min_tokens:
            self._stops.bind(slot, [(t, -torch.inf) for t in sampling.stop_token_ids])
        if sampling.has_penalty:
            self._penalties.bind(
                slot,
                (
                    sampling.repetition_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                ),
                row.history_ids[: row.num_prompt_tokens],
                row.history_ids[row.num_prompt_tokens :],
            )

    def sample(
        self,
        logits_BV: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        allowed: Sequence[bytes] = (),
    ) -> SampledTokens:
        """Sample one token per row.

        `slots` are the rows' bound slots, each at most once; `positions` the absolute positions
        of the tokens being sampled; `allowed` the masks of all rows, if any has one (see
        `core.engine_api.plan.TokenRow`). Logits of any float type; they are not changed.
        """
        rows = self._slots[np.asarray(slots)]
        position_B = np.asarray(positions, np.int64)
        edits = {
            "bias": rows["has_bias"],
            "stops": position_B < rows["first_free_position"],
            "penalties": rows["has_penalty"],
        }
        wanted = {**edits, "logprobs": rows["num_top"] >= 0}
        sent = self._send(rows, slots, position_B, wanted)
        logits_BV = logits_BV.float()
        edited_BV = self._edit(logits_BV, sent)
        masks = allowed if any(allowed) else ()
        token_ids_B, is_finite_B = self._sample(logits_BV, sent, edited_BV, masks)
        if (index_R := sent.groups.get("penalties")) is not None:
            self._penalties.count(sent.slots_B[index_R], token_ids_B[index_R])
        return SampledTokens(
            token_ids_B,
            is_finite_B,
            self._vocab_size,
            HostCopy(torch.where(is_finite_B, token_ids_B, -1)),
            tuple(rows["num_top"].tolist()),
            self._logprobs(logits_BV, token_ids_B, rows, sent),
        )

    def frame_sampler(
        self, slots: Sequence[int], positions: Sequence[int], num_codes: int
    ) -> FrameSampler:
        """For rows that sample `num_codes` codes at one position; else as `sample`.

        Temperature, top-k, top-p and min-p count; what edits logits does not.
        """
        rows = self._slots[np.asarray(slots)]
        first_B = np.asarray(positions, np.int64) * num_codes
        sent = self._send(rows, slots, first_B + np.arange(num_codes)[:, None], {})
        return FrameSampler(self, sent)

    def lay_out_frames(
        self, slots: Sequence[int], positions: Sequence[int], num_codes: int
    ) -> tuple[FrameSampleKind, list[Numbers]]:
        """As `frame_sampler`, for samples whose shapes follow from the number of rows alone.

        What `frames_over` takes, still on the host, and the kind, which it takes, too.
        """
        rows = self._slots[np.asarray(slots)]
        has_floor = bool((rows["is_filtered"] | rows["has_min_p"])[~rows["is_greedy"]].any())
        kind = FrameSampleKind(num_codes, not rows["is_greedy"].all(), has_floor)
        arrays: list[Numbers] = [np.asarray(slots, np.int64), rows["is_greedy"].astype(np.int64)]
        if kind.is_random:
            first_B = np.asarray(positions, np.int64) * num_codes
            arrays.append(uniforms(rows["key"], first_B + np.arange(num_codes)[:, None]))
        return kind, arrays

    def frames_over(self, kind: FrameSampleKind, packed: torch.Tensor) -> FrameSampler:
        """Samples for the rows that lie in `packed`, one array behind the other."""
        num_rows = len(packed) // (2 + kind.num_codes * kind.is_random)
        slots_B, is_greedy_B, uniforms = packed.tensor_split((num_rows, 2 * num_rows))
        uniform_QB = uniforms.view(torch.float64).view(kind.num_codes, -1)
        sent = _DeviceRows(
            slots_B=slots_B,
            uniform_B=uniform_QB if kind.is_random else None,
            has_floor=kind.has_floor,
            is_greedy_B=is_greedy_B.bool(),
        )
        return FrameSampler(self, sent)

    def _send(
        self,
        rows: Rows,
        slots: Sequence[int],
        positions: NDArray[np.int64],
        masks: Mapping[str, NDArray[np.bool_]],
    ) -> _DeviceRows:
        """All that a step brings over: `masks` become groups, beside those that samples need."""
        is_random = ~rows["is_greedy"]
        masks = {**masks, "filtered": rows["is_filtered"][is_random]}
        if is_random.any() and not is_random.all():
            masks |= {"greedy": ~is_random, "random": is_random}
        groups = {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}
        numbers = [uniforms(rows["key"], positions)] if is_random.any() else []
        arrays: list[Numbers] = [np.asarray(slots, np.int64), *groups.values(), *numbers]
        slots_B, *tensors = self._uploads.send(arrays)
        uniform = tensors.pop().view(positions.shape) if numbers else None
        return _DeviceRows(
            slots_B=slots_B,
            uniform_B=uniform,
            has_floor="filtered" in groups or bool(rows["has_min_p"].any()),
            groups=dict(zip(groups, tensors, strict=True)),
        )

    def _edit(self, logits_BV: torch.Tensor, sent: _DeviceRows) -> torch.Tensor | None:
        """The logits after steps 1 to 3, if any row asks for one; our kernels do the third."""
        edits = {"bias": self._bias.apply, "stops": self._stops.apply}
        if self._native is None:
            edits["penalties"] = self._penalties.apply
        if sent.groups.keys().isdisjoint(edits):
            return None
        edited_BV = logits_BV.clone()
        for name, apply in edits.items():
            if (index_R := sent.groups.get(name)) is not None:
                edited_BV[index_R] = apply(edited_BV[index_R], sent.slots_B[index_R])
        return edited_BV

    def _sample(
        self,
        logits_BV: torch.Tensor,
        sent: _DeviceRows,
        edited_BV: torch.Tensor | None = None,
        masks: Sequence[bytes] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids, by the edited logits where there are any, and which rows' logits are finite."""
        if logits_BV.is_cuda:
            from triptych.core.runtime.kernels.triton.sampling import sample_rows

            words_BW = mask_words(masks, logits_BV.shape[1], self._device) if masks else None
            ids_B, is_finite_B = sample_rows(
                logits_BV, edited_BV, words_BW, self._shape_S4, sent.slots_B, sent.uniform_B
            )
            return ids_B, is_finite_B
        logits_BV = logits_BV.float()
        if self._native is not None:
            index_R = sent.groups.get("penalties")
            penalties = None if index_R is None else self._penalties.of_rows(index_R)
            return self._native.sample_rows(
                logits_BV,
                RowEdits(edited_BV, masks, penalties),
                self._shape_S4,
                sent.slots_B,
                sent.uniform_B,
            )
        is_finite_B = torch.isfinite(logits_BV.sum(-1))
        edited_BV = logits_BV if edited_BV is None else edited_BV
        edited_BV = keep_allowed(edited_BV, masks) if masks else edited_BV
        return self._sample_by_kind(edited_BV, sent), is_finite_B

    def _sample_by_kind(self, logits_BV: torch.Tensor, sent: _DeviceRows) -> torch.Tensor:
        slots_B, uniform_B, groups = sent.slots_B, sent.uniform_B, sent.groups
        if uniform_B is None:
            return logits_BV.argmax(-1)
        if sent.is_greedy_B is not None:
            every = slice(None) if sent.has_floor else None
            sampled_B = self._sample_random(logits_BV, slots_B, uniform_B, every, sent.has_floor)
            return torch.where(sent.is_greedy_B, logits_BV.argmax(-1), sampled_B)
        filtered_R = groups.get("filtered")
        if "random" not in groups:
            return self._sample_random(logits_BV, slots_B, uniform_B, filtered_R, sent.has_floor)
        greedy_R, random_R = groups["greedy"], groups["random"]
        token_ids_B = torch.empty_like(slots_B)
        token_ids_B[greedy_R] = logits_BV[greedy_R].argmax(-1)
        token_ids_B[random_R] = self._sample_random(
            logits_BV[random_R], slots_B[random_R], uniform_B[random_R], filtered_R, sent.has_floor
        )
        return token_ids_B

    def _sample_random(
        self,
        logits_RV: torch.Tensor,
        slots_R: torch.Tensor,
        uniform_R: torch.Tensor,
        filtered_F: torch.Tensor | slice | None,
        has_floor: bool,
    ) -> torch.Tensor:
        temperature_R1, top_k_R1, top_p_R1, min_p_R1 = self._shape_S4[slots_R, :, None].unbind(1)
        probs_RV = torch.softmax(logits_RV / temperature_R1, -1)
        if has_floor:
            floor_R1 = min_p_R1 * probs_RV.amax(-1, keepdim=True)
            if filtered_F is not None:
                nucleus_F = nucleus_thresholds(
                    probs_RV[filtered_F],
                    top_k_R1[filtered_F, 0],
                    top_p_R1[filtered_F, 0],
                )
                floor_R1[filtered_F, 0] = torch.maximum(floor_R1[filtered_F, 0], nucleus_F)
            probs_RV = torch.where(probs_RV >= floor_R1, probs_RV, 0.0)
        return sample(probs_RV, uniform_R)

    def _logprobs(
        self, logits_BV: torch.Tensor, token_ids_B: torch.Tensor, rows: Rows, sent: _DeviceRows
    ) -> Logprobs | None:
        index_R = sent.groups.get("logprobs")
        if index_R is None:
            return None
        # The same number for every row, so that ties at the end fall alike in any batch.
        count = MAX_LOGPROBS if rows["num_top"].max() > 0 else 0
        return Logprobs.of(logits_BV[index_R], token_ids_B[index_R], count)


class FrameSampler:
    """Samples the codes of one frame for some rows, one code of all rows at a time.

    `slots_B` and `is_finite_B` (no logits so far held NaN or infinities) are on the device.
    """

    __slots__ = ("_sampler", "_sent", "is_finite_B", "slots_B")

    def __init__(self, sampler: Sampler, sent: _DeviceRows) -> None:
        self._sampler = sampler
        self._sent = sent
        self.slots_B = sent.slots_B
        self.is_finite_B = torch.ones_like(self.slots_B, dtype=torch.bool)

    def sample(self, logits_BV: torch.Tensor, code: int) -> torch.Tensor:
        """Ids of the `code`-th code of each row's frame, from logits of any float type."""
        ids_B, is_finite_B = self._sampler._sample(logits_BV, self._sent.for_code(code))
        self.is_finite_B &= is_finite_B
        return ids_B

    def sample_all(self, logits_BQV: torch.Tensor) -> torch.Tensor:
        """All codes of each row's frame at once: `codes_BQ`."""
        num_rows, num_codes, _ = logits_BQV.shape
        sent = self._sent.repeated(num_codes)
        codes, is_finite = self._sampler._sample(logits_BQV.flatten(0, 1), sent)
        self.is_finite_B &= is_finite.view(num_rows, num_codes).all(1)
        return codes.view(num_rows, num_codes)


def _flags(sampling: SamplingParams, num_prompt_tokens: int) -> tuple[int | bool, ...]:
    """The `_SLOT` record of a row."""
    is_greedy = (
        sampling.temperature < _MIN_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0
    )
    return (
        stream_key(sampling.seed, sampling.sample_index),
        is_greedy,
        sampling.top_k > 0 or sampling.top_p < 1,
        sampling.min_p > 0,
        bool(sampling.logit_bias),
        sampling.has_penalty,
        num_prompt_tokens + sampling.min_tokens if sampling.stop_token_ids else 0,
        -1 if sampling.top_logprobs is None else sampling.top_logprobs,
    )

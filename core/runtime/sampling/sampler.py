"""Samples one token per row of a step, vectorized over the batch.

Owns the per-slot sampling state and the order of its steps. Knows nothing of models, pages or jobs.

A step's logits pass through, each only for the rows that need it:

1. `logit_bias`, 2. `min_tokens` (stop tokens forbidden until enough output), 3. repetition, then
frequency and presence penalties, 4. the grammar's token mask, 5. temperature, 6. top-k, 7. top-p,
8. min-p, 9. the sample.

With a temperature below 1e-5, `top_k=1` or `top_p=0` a row is greedy: the likeliest token after
step 4 (the lowest id among equals). The host chooses the operations of each row by flags set when
its slot is bound, so a step never waits for the device, and uploads its choices in one copy. Every
operation works on one row only: no row's token depends on other rows of its batch.

Shapes: B rows of the step, S slots, V vocabulary, R rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from triptych.core.runtime.sampling.acceptance import LossyRules
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.logprobs import Logprobs
from triptych.core.runtime.sampling.processors import (
    Penalties,
    SparseEdits,
    keep_allowed,
    mask_words,
)
from triptych.core.runtime.sampling.randomness import stream_key, uniforms
from triptych.core.runtime.sampling.rows import CapturedRows, GroupedRows, StepRows, kept_probs

LOGIT_BYTES = 56
"""Bytes of a sample for each logit of a row with all options: counts, probabilities, and their
order with its running sums in float64."""
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
"""The host's record of a slot. Before `first_free_position` stop tokens are forbidden; `num_top` is
-1 without log-probabilities."""

SlotRecords = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class FrameSampleKind:
    """The properties of a frame's samples that the shapes in a captured step depend on."""

    num_codes: int
    is_random: bool
    has_floor: bool


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step. The device tensors feed the next step; the host copy is started."""

    token_ids_B: torch.Tensor
    is_finite_B: torch.Tensor
    _vocab_size: int
    _ids: HostCopy
    _num_top: tuple[int, ...]
    _logprobs: Logprobs | None

    def to_results(self) -> tuple[TokenDelta, ...]:
        """Wait for the copies. A row whose id is out of range is marked as not finite."""
        token_ids = self._ids.get().tolist()
        return tuple(
            [
                TokenDelta(token_ids=(token_id,), logprobs=entries)
                if 0 <= token_id < self._vocab_size
                else TokenDelta(is_finite=False)
                for token_id, entries in zip(token_ids, self._entries(), strict=True)
            ]
        )

    def _entries(self) -> list[tuple[TokenLogprob, ...]]:
        if self._logprobs is None:
            return [()] * len(self._num_top)
        wanted = [count for count in self._num_top if count >= 0]
        entries = iter(self._logprobs.to_entries(wanted))
        return [(next(entries),) if count >= 0 else () for count in self._num_top]


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows of a step that are sampled: their slots' records, positions and masks."""

    records: SlotRecords
    slots: Sequence[int]
    position_B: NDArray[np.int64]
    allowed: Sequence[bytes]

    def part(self, index: Sequence[int]) -> _Batch:
        """Rows `index` alone."""
        allowed = [self.allowed[n] for n in index] if self.allowed else []
        return _Batch(
            records=self.records[index],
            slots=[self.slots[n] for n in index],
            position_B=self.position_B[index],
            allowed=allowed if any(allowed) else (),
        )


def _penalized_runs(slots: Sequence[int], has_penalty: NDArray[np.bool_]) -> list[list[int]]:
    """The rows of each slot with penalties that has several."""
    by_slot: dict[int, list[int]] = {}
    for index in np.flatnonzero(has_penalty).tolist():
        by_slot.setdefault(slots[index], []).append(index)
    return [run for run in by_slot.values() if len(run) > 1]


class Sampler:
    """Sampling state of one model's batch slots. Used from one thread."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_batch_size: int,
        device: torch.device,
        native: NativeKernels | None = None,
        lossy: LossyRules | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._lossy = lossy
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
        """Set a slot to a row's parameters, and to its history where penalties need one."""
        sampling, slot = row.sampling, row.slot
        assert sampling is not None, "the row starts in its slot"
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
        drafts: Sequence[int] = (),
        relaxed: Sequence[bool] = (),
    ) -> SampledTokens:
        """Sample one token per row.

        `slots` are the rows' bound slots; `positions` the absolute positions of the tokens being
        sampled; `allowed` the masks of all rows, if any has one (see
        `core.engine_api.plan.TokenRow`). With `drafts` a slot may have several rows, one after the
        other: each is followed by the draft of the next one, the last one by none (-1). A draft
        that counts by lossy rules is the row's token; `relaxed` are the rows with the rule of
        reasoning. Logits of any float type; they are not changed.
        """
        records = self._slots[np.asarray(slots)]
        position_B = np.asarray(positions, np.int64)
        batch = _Batch(records, slots, position_B, allowed if any(allowed) else ())
        logits_BV = logits_BV.float()
        runs = _penalized_runs(slots, records["has_penalty"]) if drafts else []
        rows = self._rows(batch)
        if runs:
            token_ids_B, is_finite_B = self._sample_runs(logits_BV, batch, runs, drafts)
        else:
            token_ids_B, is_finite_B = self._sample_counted(logits_BV, batch, rows)
        if self._lossy is not None and drafts:
            draft_B = np.asarray(drafts, np.int64)
            token_ids_B = self._accept_near(logits_BV, batch, draft_B, relaxed, token_ids_B)
        return SampledTokens(
            token_ids_B,
            is_finite_B,
            self._vocab_size,
            HostCopy(torch.where(is_finite_B, token_ids_B, -1)),
            tuple(records["num_top"].tolist()),
            self._logprobs(logits_BV, token_ids_B, records, rows),
        )

    def _rows(self, batch: _Batch) -> GroupedRows:
        """Upload the rows of a batch, grouped by the edits that they need."""
        records = batch.records
        masks = {
            "bias": records["has_bias"],
            "stops": batch.position_B < records["first_free_position"],
            "penalties": records["has_penalty"],
            "logprobs": records["num_top"] >= 0,
        }
        return self._upload(records, batch.slots, batch.position_B, masks)

    def _sample_counted(
        self,
        logits_BV: torch.Tensor,
        batch: _Batch,
        rows: GroupedRows,
        counts_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample, and count the tokens of rows with penalties: once, or as `counts_B` says."""
        row_edits = self._edit(logits_BV, rows, batch.allowed)
        token_ids_B, is_finite_B = self._sample(logits_BV, rows, row_edits)
        if (index_R := rows.groups.get("penalties")) is not None:
            counts_R = 1 if counts_B is None else counts_B[index_R]
            self._penalties.count(rows.slots_B[index_R], token_ids_B[index_R], counts_R)
        return token_ids_B, is_finite_B

    def _sample_runs(
        self,
        logits_BV: torch.Tensor,
        batch: _Batch,
        runs: Sequence[Sequence[int]],
        drafts: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample rows of penalized slots one after the other: each counts the tokens before it.

        What follows a wrong draft is not counted. All other rows are sampled with the first ones.
        """
        later = {index for run in runs for index in run[1:]}
        turns = [[index for index in range(len(drafts)) if index not in later]]
        turns += [[run[n] for run in runs if n < len(run)] for n in range(1, max(map(len, runs)))]
        (draft_B,) = self._uploads.send([np.asarray(drafts, np.int64)])
        token_ids_B = torch.empty_like(draft_B)
        is_finite_B, is_right_B = (torch.ones_like(draft_B, dtype=torch.bool) for _ in range(2))
        for turn in turns:
            arrays = [np.array(turn), np.array([max(index - 1, 0) for index in turn])]
            index_N, before_N = self._uploads.send(arrays)
            part = batch.part(turn)
            if turn is not turns[0]:
                is_same_N = token_ids_B[before_N] == draft_B[before_N]
                is_right_B[index_N] = is_right_B[before_N] & is_same_N
            found = self._sample_counted(
                logits_BV[index_N], part, self._rows(part), is_right_B[index_N].int()
            )
            token_ids_B[index_N], is_finite_B[index_N] = found
        return token_ids_B, is_finite_B

    def _accept_near(
        self,
        logits_BV: torch.Tensor,
        batch: _Batch,
        draft_B: NDArray[np.int64],
        relaxed: Sequence[bool],
        token_ids_B: torch.Tensor,
    ) -> torch.Tensor:
        """The sampled tokens, or drafts that count by lossy rules.

        Rows whose logits are edited keep the exact rule, as do those with masks under thresholds.
        """
        rules, records = self._lossy, batch.records
        assert rules is not None, "there are lossy rules"
        is_open_B = ~(records["has_bias"] | records["has_penalty"]) & (draft_B >= 0)
        is_open_B &= batch.position_B >= records["first_free_position"]
        is_relaxed_B = is_open_B & np.array(relaxed or [False], np.bool_)
        is_judged_B = is_open_B & ~is_relaxed_B & ~records["is_greedy"] & rules.has_thresholds
        if batch.allowed:
            is_judged_B &= ~np.array([bool(mask) for mask in batch.allowed])
        found_B = token_ids_B.clone()
        if is_relaxed_B.any():
            arrays: list[Numbers] = [np.flatnonzero(is_relaxed_B), draft_B[is_relaxed_B]]
            index_R, draft_R = self._uploads.send(arrays)
            is_near_R = rules.are_near(logits_BV[index_R], draft_R)
            found_B[index_R] = torch.where(is_near_R, draft_R, token_ids_B[index_R])
        if is_judged_B.any():
            judged = np.flatnonzero(is_judged_B)
            slots = np.asarray(batch.slots, np.int64)[judged]
            coins = uniforms(~records["key"][judged], batch.position_B[judged])
            arrays = [judged, draft_B[judged], slots, coins]
            index_R, draft_R, slots_R, coin_R = self._uploads.send(arrays)
            shape_R4 = self._shape_S4[slots_R]
            probs_RV = kept_probs(logits_BV[index_R], shape_R4, slice(None), has_floor=True)
            is_passed_R = rules.pass_thresholds(probs_RV, draft_R, coin_R)
            found_B[index_R] = torch.where(is_passed_R, draft_R, token_ids_B[index_R])
        return found_B

    def frame_sampler(
        self, slots: Sequence[int], positions: Sequence[int], num_codes: int
    ) -> FrameSampler:
        """Create a sampler for rows with `num_codes` codes at one position.

        Temperature, top-k, top-p and min-p are used; edits of logits are not.
        """
        records = self._slots[np.asarray(slots)]
        first_B = np.asarray(positions, np.int64) * num_codes
        rows = self._upload(records, slots, first_B + np.arange(num_codes)[:, None], {})
        return FrameSampler(self, rows)

    def lay_out_frames(
        self, slots: Sequence[int], positions: Sequence[int], num_codes: int
    ) -> tuple[FrameSampleKind, list[Numbers]]:
        """As `frame_sampler`, for shapes that depend only on the number of rows.

        Returns the arguments of `captured_frames`: the kind, and arrays on the host.
        """
        records = self._slots[np.asarray(slots)]
        has_floor = bool(
            (records["is_filtered"] | records["has_min_p"])[~records["is_greedy"]].any()
        )
        kind = FrameSampleKind(num_codes, not records["is_greedy"].all(), has_floor)
        arrays: list[Numbers] = [np.asarray(slots, np.int64), records["is_greedy"].astype(np.int64)]
        if kind.is_random:
            first_B = np.asarray(positions, np.int64) * num_codes
            arrays.append(uniforms(records["key"], first_B + np.arange(num_codes)[:, None]))
        return kind, arrays

    def captured_frames(self, kind: FrameSampleKind, packed: torch.Tensor) -> FrameSampler:
        """Create a sampler for the concatenated arrays of `lay_out_frames`."""
        num_rows = len(packed) // (2 + kind.num_codes * kind.is_random)
        slots_B, is_greedy_B, uniforms = packed.tensor_split((num_rows, 2 * num_rows))
        uniform_QB = uniforms.view(torch.float64).view(kind.num_codes, -1)
        rows = CapturedRows(
            slots_B=slots_B,
            uniform_B=uniform_QB if kind.is_random else None,
            has_floor=kind.has_floor,
            is_greedy_B=is_greedy_B.bool(),
        )
        return FrameSampler(self, rows)

    def _upload(
        self,
        records: SlotRecords,
        slots: Sequence[int],
        positions: NDArray[np.int64],
        masks: Mapping[str, NDArray[np.bool_]],
    ) -> GroupedRows:
        """Upload a step's rows: `masks` become groups, in addition to those for sampling."""
        is_random = ~records["is_greedy"]
        masks = {**masks, "filtered": records["is_filtered"][is_random]}
        if is_random.any() and not is_random.all():
            masks |= {"greedy": ~is_random, "random": is_random}
        groups = {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}
        numbers = [uniforms(records["key"], positions)] if is_random.any() else []
        arrays: list[Numbers] = [np.asarray(slots, np.int64), *groups.values(), *numbers]
        slots_B, *tensors = self._uploads.send(arrays)
        uniform = tensors.pop().view(positions.shape) if numbers else None
        return GroupedRows(
            slots_B=slots_B,
            uniform_B=uniform,
            has_floor="filtered" in groups or bool(records["has_min_p"].any()),
            groups=dict(zip(groups, tensors, strict=True)),
        )

    def _edit(self, logits_BV: torch.Tensor, rows: GroupedRows, masks: Sequence[bytes]) -> RowEdits:
        """Apply steps 1 to 3 where a row needs one; our CPU kernels apply the penalties."""
        edits = {"bias": self._bias.apply, "stops": self._stops.apply}
        penalties = None
        if self._native is None:
            edits["penalties"] = self._penalties.apply
        elif (index_R := rows.groups.get("penalties")) is not None:
            penalties = self._penalties.of_rows(index_R)
        if rows.groups.keys().isdisjoint(edits):
            return RowEdits(None, masks, penalties)
        edited_BV = logits_BV.clone()
        for name, apply in edits.items():
            if (index_R := rows.groups.get(name)) is not None:
                edited_BV[index_R] = apply(edited_BV[index_R], rows.slots_B[index_R])
        return RowEdits(edited_BV, masks, penalties)

    def _sample(
        self, logits_BV: torch.Tensor, rows: StepRows, edits: RowEdits | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, and which rows' logits are finite."""
        edits = edits or RowEdits()
        edited_BV, masks = edits.edited_BV, edits.masks
        if logits_BV.is_cuda:
            from triptych.core.runtime.kernels.triton.sampling import sample_rows

            words_BW = mask_words(masks, logits_BV.shape[1], self._device) if masks else None
            ids_B, is_finite_B = sample_rows(
                logits_BV, edited_BV, words_BW, self._shape_S4, rows.slots_B, rows.uniform_B
            )
            return ids_B, is_finite_B
        logits_BV = logits_BV.float()
        if self._native is not None:
            return self._native.sample_rows(
                logits_BV, edits, self._shape_S4, rows.slots_B, rows.uniform_B
            )
        is_finite_B = torch.isfinite(logits_BV.sum(-1))
        edited_BV = logits_BV if edited_BV is None else edited_BV
        edited_BV = keep_allowed(edited_BV, masks) if masks else edited_BV
        return rows.sample(edited_BV, self._shape_S4), is_finite_B

    def _logprobs(
        self,
        logits_BV: torch.Tensor,
        token_ids_B: torch.Tensor,
        records: SlotRecords,
        rows: GroupedRows,
    ) -> Logprobs | None:
        index_R = rows.groups.get("logprobs")
        if index_R is None:
            return None
        # The same number for every row, so that ties at the end are cut alike in any batch.
        count = MAX_LOGPROBS if records["num_top"].max() > 0 else 0
        return Logprobs.of(logits_BV[index_R], token_ids_B[index_R], count)


class FrameSampler:
    """Samples the codes of one frame for some rows, one code of all rows at a time.

    `slots_B` and `is_finite_B` (no logits so far held NaN or infinities) are on the device.
    """

    __slots__ = ("_rows", "_sampler", "is_finite_B", "slots_B")

    def __init__(self, sampler: Sampler, rows: StepRows) -> None:
        self._sampler = sampler
        self._rows = rows
        self.slots_B = rows.slots_B
        self.is_finite_B = torch.ones_like(self.slots_B, dtype=torch.bool)

    def sample(self, logits_BV: torch.Tensor, code: int) -> torch.Tensor:
        """Sample the `code`-th code of each row's frame, from logits of any float type."""
        ids_B, is_finite_B = self._sampler._sample(logits_BV, self._rows.for_code(code))
        self.is_finite_B &= is_finite_B
        return ids_B

    def sample_all(self, logits_BQV: torch.Tensor) -> torch.Tensor:
        """Sample all codes of each row's frame at once: `codes_BQ`."""
        num_rows, num_codes, _ = logits_BQV.shape
        rows = self._rows.repeated(num_codes)
        codes, is_finite = self._sampler._sample(logits_BQV.flatten(0, 1), rows)
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

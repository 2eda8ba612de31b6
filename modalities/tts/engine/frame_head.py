"""Token steps whose tokens are frames: several codes, embedded and sampled by the model itself.

Owns each slot's last frame, on the device, and the frames of its prompt, on the host. Implements
`core.runtime.engine.token_runner.TokenHead`. Knows no codec, and leaves the sampling of codes to
the model: see `FrameModel`. Sampling parameters that act before temperature (penalties, bias) are
for text alone.

Shapes: T tokens of the step, X text positions, F frame positions, D decode rows, R sampled rows, Q
codes of a frame, H tokens of a prompt, C hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch.nn import functional

from triptych.core.engine_api.frames import END_FRAME_ID, FIRST_FRAME_ID, StepCodes, frame_id
from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.runtime.devices.upload import Uploads
from triptych.core.runtime.engine.token_runner import RowResults, StepLayout
from triptych.core.runtime.graphs.backend import Tensors
from triptych.core.runtime.graphs.buckets import row_sizes, smallest
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, Int64s
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.sampler import FrameSampleKind, FrameSampler, Sampler

_NUM_FLAGS = 3
"""Values of a sampled row before its codes."""


@dataclass(frozen=True, slots=True)
class FrameInputs:
    """The inputs of a frame model: each position holds a text id or a frame.

    `text_index_X` and `frame_index_F` are their indices among the T positions. The first
    `num_decode` positions, and so the first frames, are decode rows, whose input is the frame they
    sampled last; the others are prompts. `slots_T` is the slot of each position.
    """

    text_ids_X: torch.Tensor
    text_index_X: torch.Tensor
    codes_FQ: torch.Tensor
    frame_index_F: torch.Tensor
    slots_T: torch.Tensor
    positions_T: torch.Tensor
    num_decode: int
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class FrameSamples:
    """The next frame of each sampled row, and whether its speech ends instead: `bool[R]`.

    `place_R` counts the ids of the prompt that are spoken before the frame, if the model knows.
    """

    codes_RQ: torch.Tensor
    is_end_R: torch.Tensor
    place_R: torch.Tensor | None = None


class FrameModel(Protocol):
    """The model behind a `FrameHead`. No method may wait for the device.

    A model with its own state per slot (its place in an alignment, which codebooks have ended)
    holds tensors indexed by slot, fills them in `bind`, and advances them in `sample`.
    """

    num_codes: int
    """Codes per frame."""
    sample_state: Sequence[torch.Tensor]
    """State that sampling changes, so that sampling again for the same positions would differ."""

    def bind(self, slot: int, prompt_ids: Sequence[int], sampled: Sequence[StepCodes]) -> None:
        """Assign `slot` to a row with its prompt and the frames sampled so far (none if new)."""
        ...

    def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
        """Embed and run the layers: `hidden_TC`."""
        ...

    def sample(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> FrameSamples:
        """The next frame of some rows, from the hidden state of their last position.

        `sampler.slots_B` are the rows' slots, `positions_R` the positions that the new frames will
        have. All codes are sampled through `sampler`.
        """
        ...


class FrameHead:
    """Runs a `FrameModel`; `sampler` is built for the size of a codebook.

    With `graphs` its sampling is captured. Model and sampler then have one slot more, for padding.
    """

    def __init__(
        self,
        model: FrameModel,
        sampler: Sampler,
        *,
        max_batch_size: int,
        device: torch.device,
        graphs: CapturedSteps | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._last_frames_SQ = torch.zeros(
            max_batch_size, model.num_codes, dtype=torch.int64, device=device
        )
        self._histories: dict[int, Int64s] = {}  # per slot: the codes at each known position
        self._graphs = graphs
        self._sizes = row_sizes(max_batch_size)
        self._padding_slot = max_batch_size
        self._uploads = Uploads(device)

    def bind(self, row: TokenRow) -> None:
        """Initialize the slot's sampling state, and the frames of its prompt."""
        shaping = {"temperature", "top_p", "top_k", "min_p", "seed", "sample_index"}
        assert row.sampling is not None, "a row that is bound has sampling parameters"
        given = structs.asdict(row.sampling)
        sampling = SamplingParams(**{name: given[name] for name in shaping})
        self._sampler.bind(structs.replace(row, sampling=sampling, history_ids=(), frames=()))
        history_ids = np.array(row.history_ids, dtype=np.int64)
        history_HQ = np.zeros((len(history_ids), self._model.num_codes), dtype=np.int64)
        if row.frames:
            history_HQ[history_ids >= FIRST_FRAME_ID] = row.frames
        self._histories[row.slot] = history_HQ
        num_sampled = len(row.history_ids) - row.num_prompt_tokens
        sampled = row.frames[len(row.frames) - num_sampled :]
        self._model.bind(row.slot, row.history_ids[: row.num_prompt_tokens], sampled)

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """Text ids and their positions; frames and their positions; the slot of each position."""
        is_frame_T = step.token_ids_T >= FIRST_FRAME_ID
        is_frame_T[: step.num_decode] = True
        (text_index_X,), (frame_index_F,) = (~is_frame_T).nonzero(), is_frame_T.nonzero()
        codes_FQ = np.zeros((len(frame_index_F), self._model.num_codes), dtype=np.int64)
        codes_FQ[step.num_decode :] = self._prompt_frames(step, is_frame_T)
        return (
            step.token_ids_T[text_index_X],
            text_index_X,
            codes_FQ,
            frame_index_F,
            step.slots_B[step.row_T],
        )

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """`hidden_TC`; the inputs of decode rows are the frames they sampled last."""
        text_ids_X, text_index_X, codes, frame_index_F, slots_T = step.extras
        decode_slots_D, codes_FQ = step.decode_slots_D, codes.view(-1, self._model.num_codes)
        codes_FQ[: len(decode_slots_D)] = self._last_frames_SQ.index_select(0, decode_slots_D)
        inputs = FrameInputs(
            text_ids_X,
            text_index_X,
            codes_FQ,
            frame_index_F,
            slots_T,
            step.positions_T,
            len(decode_slots_D),
            step.batch,
        )
        return self._model.forward(inputs, kv)

    def sample(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """Sample one frame per sampled row."""
        rows = [row for row in step.rows if row.is_sampled]
        if not rows:
            return SampledFrames(step.rows, None).to_results
        hidden_RC = hidden_TC.index_select(0, step.sampled_index_R)
        sampled_RN = self._replay(rows, hidden_RC)
        if sampled_RN is None:
            positions = [row.start + row.num_tokens for row in rows]
            sampler = self._sampler.frame_sampler(
                [row.slot for row in rows], positions, self._model.num_codes
            )
            positions_R = step.positions_T.index_select(0, step.sampled_index_R) + 1
            sampled_RN = self._sample(hidden_RC, positions_R, sampler)
        self._last_frames_SQ.index_copy_(0, step.sampled_slots_R, sampled_RN[:, _NUM_FLAGS:])
        return SampledFrames(step.rows, HostCopy(sampled_RN)).to_results

    def _sample(
        self, hidden_RC: torch.Tensor, positions_R: torch.Tensor, sampler: FrameSampler
    ) -> torch.Tensor:
        """Per row whether it ends, whether it is finite, its place, and its codes: `[R, 3 + Q]`."""
        samples = self._model.sample(hidden_RC, positions_R, sampler)
        place_R = samples.place_R
        if place_R is None:
            place_R = torch.full_like(positions_R, -1)
        flags_R3 = torch.stack((samples.is_end_R.long(), sampler.is_finite_B.long(), place_R), 1)
        return torch.cat((flags_R3, samples.codes_RQ), 1)

    def _replay(self, rows: Sequence[TokenRow], hidden_RC: torch.Tensor) -> torch.Tensor | None:
        """As `_sample`, from a captured graph; none if it is not, or cannot be, captured."""
        size = smallest(self._sizes, len(rows))
        if self._graphs is None or size is None:
            return None
        padding = size - len(rows)
        slots = [*(row.slot for row in rows), *[self._padding_slot] * padding]
        positions = [*(row.start + row.num_tokens for row in rows), *[1] * padding]
        kind, arrays = self._sampler.lay_out_frames(slots, positions, self._model.num_codes)
        outputs = self._graphs.run(
            (size, kind),
            partial(self._sample_static, kind),
            [
                functional.pad(hidden_RC, (0, 0, 0, padding)),
                self._uploads.pack((np.array(positions), *arrays)),
            ],
            self._model.sample_state,
        )
        return None if outputs is None else outputs[0][: len(rows)]

    def _sample_static(self, kind: FrameSampleKind, inputs: Tensors) -> Tensors:
        hidden_RC, packed = inputs
        positions_R, packed = packed.tensor_split((len(hidden_RC),))
        return [self._sample(hidden_RC, positions_R, self._sampler.captured_frames(kind, packed))]

    def _prompt_frames(self, step: StepLayout, is_frame_T: NDArray[np.bool_]) -> Int64s:
        """The frames of this step's prompt chunks, in order."""
        parts, first = [np.zeros((0, self._model.num_codes), np.int64)], step.num_decode
        for row in step.rows[step.num_decode :]:
            last = first + row.num_tokens
            chunk_HQ = self._histories[row.slot][row.start : row.start + row.num_tokens]
            parts.append(chunk_HQ[is_frame_T[first:last]])
            first = last
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """The pending frames of a step: per sampled row the values of `FrameHead._sample`."""

    rows: Sequence[TokenRow]
    sampled: HostCopy | None

    def to_results(self) -> tuple[TokenDelta, ...]:
        """One entry per row; see `core.runtime.engine.token_runner.RowResults`."""
        sampled = iter(self.sampled.get().tolist() if self.sampled else ())
        return tuple(
            _result(*next(sampled)) if row.is_sampled else TokenDelta() for row in self.rows
        )


def _result(is_end: int, is_finite: int, place: int, *codes: int) -> TokenDelta:
    if not is_finite:
        return TokenDelta(is_finite=False)
    if is_end:
        return TokenDelta(token_ids=(END_FRAME_ID,), place=place)
    return TokenDelta(token_ids=(frame_id(codes),), codes=codes, place=place)

"""The common parts of recurrent layers: two projections, and a state between them.

Owns their interface within a decoder, which is that of attention. A layer keeps a state of one size
for each row (`core.runtime.layers.states`) in place of keys and values.

Shapes: T tokens, C hidden, I inputs of the recurrent part, O outputs of it, X channels, K tokens of
a convolution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.kernels.native.arguments import DTYPES
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.native.state_arguments import (
    MAX_WIDTH,
    ConvolutionArguments,
    NativeStateRows,
    RecurrentArguments,
)
from triptych.core.runtime.kernels.paged_attention import AttentionBatch
from triptych.core.runtime.kernels.recurrent import Convolution, StateRows, StateWave
from triptych.core.runtime.layers.attention import PagedStep, StepPositions
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.states import (
    LayerState,
    StateBatch,
    StateSegment,
    StateShape,
)


class RecurrentConfig(Protocol):
    """One recurrent layer in the terms of model configurations."""

    @property
    def hidden_size(self) -> int:
        """The values of a token in the residual stream."""

    @property
    def num_inputs(self) -> int:
        """The values of a token that the recurrent part reads."""

    @property
    def num_outputs(self) -> int:
        """The values of a token that it yields."""

    @property
    def num_channels(self) -> int:
        """The channels of the convolution."""

    @property
    def width(self) -> int:
        """The tokens of the convolution."""

    @property
    def activates(self) -> bool:
        """Whether the convolution is followed by SiLU."""

    @property
    def has_bias(self) -> bool:
        """Whether projections have biases."""

    @property
    def has_convolution_bias(self) -> bool:
        """Whether the convolution has one."""

    @property
    def state(self) -> LayerState:
        """The tensors that a row keeps; the first is that of the convolution."""


def convolution_state(config: RecurrentConfig) -> StateShape:
    """The inputs that a convolution keeps."""
    return StateShape((config.width - 1, config.num_channels), torch.float32)


class RecurrentLayer:
    """A projection, a convolution and what follows it, and a second projection.

    `convolution_X1K` is loaded as checkpoints have it, `[X, 1, K]`. `cells` is the index of the
    layer's states in the cache.
    """

    kind: ClassVar[int]
    """The number of the kind in native/states.h."""

    def __init__(
        self,
        config: RecurrentConfig,
        *,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config: Any = config
        self.cells, self._dtype = cells, dtype
        new = partial(Linear, has_bias=config.has_bias, dtype=dtype, device=device)
        self.into = new(config.hidden_size, self.num_projected)
        self.out = new(config.num_outputs, config.hidden_size)
        shape = config.num_channels, 1, config.width
        self.convolution_X1K = torch.empty(shape, dtype=torch.float32, device=device)
        self.convolution_bias_X: torch.Tensor | None = None
        if config.has_convolution_bias:
            self.convolution_bias_X = torch.empty(
                config.num_channels, dtype=torch.float32, device=device
            )
        self._convolution: Convolution | None = None
        self._bound: tuple[Sequence[torch.Tensor], RecurrentArguments] | None = None

    @property
    def num_projected(self) -> int:
        """The inputs that `into` makes: all of them, where no later projection makes the others."""
        num_inputs: int = self.config.num_inputs
        return num_inputs

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.into, self.out)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for linear in self.linears():
            linear.prepare(native)
        weight_KX = self.convolution_X1K.squeeze(1).t().contiguous()
        activates = self.config.activates
        self._convolution = Convolution(weight_KX, self.convolution_bias_X, activates)

    @property
    def convolution(self) -> Convolution:
        """The prepared convolution."""
        assert self._convolution is not None, "call prepare() before the first step"
        return self._convolution

    def __call__(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        positions: StepPositions,
        step: PagedStep,
    ) -> torch.Tensor:
        """Go on with the states of the step's rows. Adds to the residual where given."""
        assert step.kv.states is not None, "a model with recurrent layers has states"
        native, states = step.kv.native, step.kv.states.layers[self.cells]
        if native is None:
            return self.out(self.mix(x_TC, states, rows_of(step)), residual_TC)
        in_TI = self.inputs(x_TC)
        out_TO = in_TI.new_empty(len(in_TI), self.config.num_outputs)
        native.recur(self._bind(states), native_rows_of(step), in_TI, out_TO)
        return self.out(out_TO, residual_TC)

    def inputs(self, x_TC: torch.Tensor) -> torch.Tensor:
        """The inputs of the recurrent part, `in_TI`."""
        return self.into(x_TC)

    def mix(
        self, x_TC: torch.Tensor, states: Sequence[torch.Tensor], rows: StateRows
    ) -> torch.Tensor:
        """Compute what the last projection reads, `out_TO`."""
        raise NotImplementedError

    def _bind(self, states: Sequence[torch.Tensor]) -> RecurrentArguments:
        """The structure for a cache; usually that stays the same."""
        if self._bound is None or self._bound[0] is not states:
            self._bound = states, self.arguments(states)
        return self._bound[1]

    def arguments(self, states: Sequence[torch.Tensor]) -> RecurrentArguments:
        """The structure of the recurrent part, with its states."""
        by = self.convolution
        assert self.config.width <= MAX_WIDTH, "configurations check it"
        return RecurrentArguments(
            convolution=ConvolutionArguments(
                by.weight_KX.data_ptr(),
                None if by.bias_X is None else by.bias_X.data_ptr(),
                states[0].data_ptr(),
                self.config.num_channels,
                self.config.width,
                by.activates,
            ),
            in_width=self.config.num_inputs,
            out_width=self.config.num_outputs,
            kind=self.kind,
            dtype=DTYPES[self._dtype],
        )


def rows_of(step: PagedStep) -> StateRows:
    """The tokens of a step between snapshots, the same object for all layers."""
    states = step.states
    assert states is not None, "the runner finds the rows' states"
    if states.rows is None:
        states.rows = _waves(step.batch, states)
    return states.rows


def _waves(batch: AttentionBatch, states: StateBatch) -> StateRows:
    lengths = batch.host_query_lengths_B.tolist()
    if batch.num_decode_rows == len(lengths):  # perhaps captured: nothing comes from the host
        return [StateWave(batch.query_starts_B, torch.ones_like(states.slots_B), states.slots_B, 1)]
    waves: list[list[StateSegment]] = []
    counts: Counter[int] = Counter()
    for segment in states.segments(lengths):
        if counts[segment.row] == len(waves):
            waves.append([])
        waves[counts[segment.row]].append(segment)
        counts[segment.row] += 1
    return [_wave(segments, states) for segments in waves]


def _wave(segments: Sequence[StateSegment], states: StateBatch) -> StateWave:
    device, slots = states.slots_B.device, states.host_slots_B
    starts = [segment.start for segment in segments]
    lengths = [segment.stop - segment.start for segment in segments]
    own = [slots[segment.row] for segment in segments]
    starts_B, lengths_B, slots_B = (
        to_device(torch.tensor(each), device) for each in (starts, lengths, own)
    )
    copies = [(slots[each.row], each.line) for each in segments if each.line >= 0]
    return StateWave(starts_B, lengths_B, slots_B, max(lengths), copies)


def native_rows_of(step: PagedStep) -> NativeStateRows:
    """The rows of a step for the native kernels, the same object for all layers."""
    states = step.states
    assert states is not None, "the runner finds the rows' states"
    assert step.kv.states is not None
    if states.native_rows is None:
        lengths_B, line_bytes = step.batch.host_query_lengths_B.tolist(), step.kv.states.line_bytes
        states.native_rows = NativeStateRows(
            lengths_B, states.host_slots_B, states.cuts, line_bytes
        )
    return states.native_rows

"""The streaming twins of modules: layers that keep their own past.

Owns the geometry of a push (its rows, each stream's position, its padding) and how stages compose:
chains, sums of parallel branches with equalized delays, pointwise maps. Knows no layer's
arithmetic.

Every point of a decoder carries a stream that trails the decoder's input by a constant `lag`, so
that each push of F frames makes every layer compute exactly F * rate steps, whatever the row. A
stream therefore begins with `lag` steps of times before 0; a flush makes every layer compute the
`lag` steps (less what the layer trims) that are still missing, and no more. `CodecStep.at_edges`
applies the layer's own padding rule outside of a stream. In the steady state, which the host knows
from frame counts, it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor, nn

from triptych.core.errors import WeightsError
from triptych.core.runtime.devices.transfer import to_device

_FAR = 2**40  # frames


class Padding(Enum):
    """How a layer pads a stream before its start and beyond its end."""

    ZEROS = "zeros"
    REPLICATE = "replicate"
    REFLECT = "reflect"
    """Reflection at the start; zeros beyond the end."""


@dataclass(frozen=True, slots=True)
class SignalRate:
    """A point of the decoder: `rate` steps per frame, trailing the input by `lag` steps.

    `short` is the number of steps by which a whole stream is shorter than frames * rate, because
    layers trim their output.
    """

    rate: int = 1
    lag: int = 0
    short: int = 0


class SlotState:
    """One tensor of per-row state, [slots, ...], allocated by the first read; new rows read 0."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def clear(self, rows_B: Tensor) -> None:
        """Set the state of these rows to 0."""
        if self.tensor is not None:
            self.tensor.index_fill_(0, rows_B, 0)


class CodecStep:
    """One push of `num_frames` frames to `rows`; or a flush, which ends them without new frames."""

    def __init__(
        self,
        rows: Sequence[int],
        *,
        num_frames: int,
        starts: Sequence[int],
        num_valid: Sequence[int] | None,
        seeds: Tensor,
    ) -> None:
        """`starts` are the frames each row had; without `num_valid` the streams end there.

        `seeds` are all slots', for layers that add noise; they also set the device.
        """
        self.num_frames = num_frames
        self.min_start, self.max_start = min(starts), max(starts)
        self.is_flush = num_valid is None
        self.is_ragged = num_valid is not None and any(n != num_frames for n in num_valid)
        self.reach = 0  # frames after which no layer's window reaches back to a row's start
        self._rows, self._starts, self._seeds = rows, starts, seeds
        self._device = seeds.device
        is_run = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._run = slice(rows[0], rows[0] + len(rows)) if is_run else None  # a view, not a copy
        self.valid_B = to_device(torch.tensor(num_valid), self._device) if self.is_ragged else None

    # Created on demand: most steps of most codecs need none.
    @cached_property
    def rows_B(self) -> Tensor:  # noqa: N802 - a tensor, named by its shape
        """The slots of the rows."""
        return to_device(torch.tensor(self._rows), self._device)

    @cached_property
    def starts_B(self) -> Tensor:  # noqa: N802 - a tensor, named by its shape
        """Frames each row had before this step."""
        return to_device(torch.tensor(self._starts), self._device)

    @cached_property
    def seeds_B(self) -> Tensor:  # noqa: N802 - a tensor, named by its shape
        """The seed of each row's noise."""
        return self._seeds[self.rows_B]

    def read(self, state: SlotState, shape: Sequence[int], like: Tensor) -> Tensor:
        """This step's rows of `state`, [B, *shape]."""
        slots = self.slots(state, shape, like)
        return slots.index_select(0, self.rows_B) if self._run is None else slots[self._run]

    def slots(self, state: SlotState, shape: Sequence[int], like: Tensor) -> Tensor:
        """All slots of `state`, [slots, *shape]."""
        if state.tensor is None:
            state.tensor = like.new_zeros(len(self._seeds), *shape)
        return state.tensor

    def num_steps(self, signal: SignalRate) -> int:
        """Steps computed at `signal`."""
        if self.is_flush:
            return signal.lag - signal.short
        return self.num_frames * signal.rate

    def keep(self, state: SlotState, buffer: Tensor, length: int, rate: int) -> None:
        """Write to `state` the last `length` entries (last dim) of each row's valid part.

        `buffer` holds at least `length` entries more than this push has steps.
        """
        if self.is_flush:
            return
        if self.valid_B is None:
            self.write(state, buffer.narrow(-1, self.num_frames * rate, length))
        else:
            offsets_L = torch.arange(length, device=buffer.device)
            self.write(state, _gather_last(buffer, self.valid_B[:, None] * rate + offsets_L))

    def write(self, state: SlotState, value: Tensor) -> None:
        """Write this step's rows of `state`."""
        assert state.tensor is not None
        if self._run is not None:
            state.tensor[self._run] = value
        else:
            state.tensor.index_copy_(0, self.rows_B, value)

    def without_invalid(self, x_BCT: Tensor, rate: int) -> Tensor:
        """`x_BCT` with zeros in the frames beyond each row's own."""
        if self.valid_B is None:
            return x_BCT
        times_T = torch.arange(x_BCT.shape[-1], device=x_BCT.device)
        return x_BCT.where(times_T < self.valid_B[:, None, None] * rate, 0)

    def times(self, signal: SignalRate, length: int, *, before: int = 0) -> Tensor:
        """Time of each of `length` steps at `signal`, [B, length], from `before` steps earlier."""
        offsets = torch.arange(length, device=self._device) - (signal.lag + before)
        return self.starts_B[:, None] * signal.rate + offsets

    def has_edge(self, signal: SignalRate, before: int, padding: Padding = Padding.ZEROS) -> bool:
        """Whether a row's entries, from `before` steps earlier, reach beyond its stream."""
        if self.is_flush:
            return True
        is_blank = (
            padding is Padding.ZEROS and signal.lag == 0
        )  # the state is initialized with zeros
        if is_blank:
            return False
        self.reach = max(self.reach, -(-(signal.lag + before) // signal.rate))
        return self.min_start * signal.rate < signal.lag + before

    def at_edges(
        self, buffer: Tensor, signal: SignalRate, before: int, padding: Padding = Padding.ZEROS
    ) -> Tensor:
        """`buffer` [B, C, before + T] with `padding` outside of each row's stream."""
        if not self.has_edge(signal, before, padding):
            return buffer
        times_BT = self.times(signal, buffer.shape[-1], before=before)
        source_BT = times_BT.abs() if padding is Padding.REFLECT else times_BT
        ends_B1 = self.starts_B[:, None] * signal.rate - signal.short
        if padding is Padding.REPLICATE:
            source_BT = source_BT.clamp(min=0)
            source_BT = torch.minimum(source_BT, ends_B1 - 1) if self.is_flush else source_BT
        if padding is not Padding.ZEROS:
            first_B1 = times_BT[:, :1]
            index_BT = (source_BT - first_B1).clamp(0, buffer.shape[-1] - 1)
            buffer = _gather_last(buffer, index_BT)
        if padding is Padding.REPLICATE:
            return buffer
        is_inside_BT = source_BT >= 0
        if self.is_flush:
            is_inside_BT &= source_BT < ends_B1
        return buffer.where(is_inside_BT[:, None], 0)

    def bounds(self, signal: SignalRate, starts: Sequence[int], valid: Sequence[int]) -> Bounds:
        """Which of the steps at `signal` are samples: (starts, stops), one pair per row."""
        length = self.num_steps(signal)
        firsts = tuple(min(max(signal.lag - s * signal.rate, 0), length) for s in starts)
        if self.is_flush:
            return firsts, (length,) * len(firsts)
        lasts = (n * signal.rate for n in valid)
        return firsts, tuple(max(pair) for pair in zip(firsts, lasts, strict=True))


class SettledStep(CodecStep):
    """A push to rows that are all past their start; see `CodecStep.reach`.

    Rows and positions are known on the device alone, so the step can be captured.
    """

    def __init__(self, rows_B: Tensor, *, num_frames: int, starts_B: Tensor, seeds: Tensor) -> None:
        self.num_frames = num_frames
        self.min_start = self.max_start = _FAR
        self.is_flush = self.is_ragged = False
        self.reach = 0
        self.rows_B, self.starts_B, self.valid_B = rows_B, starts_B, None
        self._seeds, self._device, self._run = seeds, seeds.device, None


Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def _gather_last(buffer: Tensor, index_BT: Tensor) -> Tensor:
    """`buffer` [B, ..., N] at per-row indices of its last dim."""
    shape = (index_BT.shape[0], *[1] * (buffer.dim() - 2), index_BT.shape[1])
    return buffer.gather(-1, index_BT.view(shape).expand(*buffer.shape[:-1], -1))


class Unstreamable(Exception):
    """Why a module has no streaming twin; the builder adds the module's path."""


class StreamingStage(nn.Module):
    """Maps the next steps of a stream, [B, C, T], to the next steps of another.

    `bind` is called once with the input's rate and lag, and returns the output's.
    """

    def bind(self, signal: SignalRate) -> SignalRate:
        """Store the input's rate and lag; return the output's."""
        raise NotImplementedError

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """The output steps of this push."""
        raise NotImplementedError

    def states(self) -> Iterator[SlotState]:
        """Every state tensor of this stage and its children."""
        for module in self.modules():
            yield from (s for s in vars(module).values() if isinstance(s, SlotState))


class Pointwise(StreamingStage):
    """Each step of the output depends on the same step of the input alone."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def bind(self, signal: SignalRate) -> SignalRate:
        """Pointwise: adds no lag."""
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Apply the function."""
        return self.function(x_BCT)


class Chain(StreamingStage):
    """Stages in sequence; without any, the identity."""

    def __init__(self, *stages: StreamingStage) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def bind(self, signal: SignalRate) -> SignalRate:
        """Delays add up, scaled by the rates that follow."""
        for stage in self.stages:
            assert isinstance(stage, StreamingStage)
            signal = stage.bind(signal)
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Apply each stage in turn."""
        for stage in self.stages:
            x_BCT = stage(x_BCT, step)
        return x_BCT


class Delay(StreamingStage):
    """A stream delayed by `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.state = SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Add the delay to the lag."""
        self.end = SignalRate(signal.rate, signal.lag + self.num_steps, signal.short)
        return self.end

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Return the delayed steps first."""
        past_BCL = step.read(self.state, (x_BCT.shape[1], self.num_steps), x_BCT)
        buffer = torch.cat((past_BCL, x_BCT), -1)
        step.keep(self.state, buffer, self.num_steps, self.end.rate)
        return buffer[..., : step.num_steps(self.end)]


class Sum(StreamingStage):
    """The sum of parallel branches, each delayed to the slowest."""

    def __init__(self, *branches: StreamingStage) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def bind(self, signal: SignalRate) -> SignalRate:
        """The lag of the slowest branch."""
        ends = [_stage(branch).bind(signal) for branch in self.branches]
        slowest = max(ends, key=lambda end: end.lag)
        for index, end in enumerate(ends):
            if (end.rate, end.short) != (slowest.rate, slowest.short):
                raise WeightsError("Branches of different length cannot be added as streams.")
            if end.lag < slowest.lag:
                delay = Delay(slowest.lag - end.lag)
                delay.bind(end)
                self.branches[index] = Chain(_stage(self.branches[index]), delay)
        return slowest

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Add up the branches."""
        first, *others = self.branches
        total: Tensor = first(x_BCT, step)
        for branch in others:
            total = total + branch(x_BCT, step)
        return total


def residual(*stages: StreamingStage) -> Sum:
    """A chain with a skip connection around it."""
    return Sum(Chain(), Chain(*stages))


def channels_last(modules: Sequence[Callable[[Tensor], Tensor]]) -> Pointwise:
    """A sequence of pointwise modules that expect channels last."""

    def apply(x_BCT: Tensor) -> Tensor:
        x_BTC = x_BCT.transpose(1, 2)
        for module in modules:
            x_BTC = module(x_BTC)
        return x_BTC.transpose(1, 2)

    return Pointwise(apply)


def _stage(module: nn.Module) -> StreamingStage:
    assert isinstance(module, StreamingStage)
    return module

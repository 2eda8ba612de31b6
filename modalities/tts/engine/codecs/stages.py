"""The streaming twins of modules: what a decoder becomes when its layers keep their own past.

Owns how stages compose: chains, parallel sums whose branches are brought to one delay, pointwise
maps. Knows no layer with a past but the delay line; those are in the files beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs.step import CodecStep, SignalRate, SlotState


class Misfit(Exception):
    """Why a module has no streaming twin; the builder adds where the module is."""


class StreamingStage(nn.Module):
    """Maps the next steps of a stream, [B, C, T], to the next steps of another.

    `bind` is called once, with where the input stands, and says where the output stands.
    """

    def bind(self, signal: SignalRate) -> SignalRate:
        """Take note of the input's rate and lag; return the output's."""
        raise NotImplementedError

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """The output steps of this push."""
        raise NotImplementedError

    def states(self) -> Iterator[SlotState]:
        """Every state tensor of this stage and those within."""
        for module in self.modules():
            yield from (s for s in vars(module).values() if isinstance(s, SlotState))


class Pointwise(StreamingStage):
    """Each step of the output depends on that step of the input alone."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def bind(self, signal: SignalRate) -> SignalRate:
        """No delay."""
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Apply the function."""
        return self.function(x_BCT)


class Chain(StreamingStage):
    """One stage after another; of none, the identity."""

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
        """Apply each in turn."""
        for stage in self.stages:
            x_BCT = stage(x_BCT, step)
        return x_BCT


class Delay(StreamingStage):
    """A stream, `num_steps` later."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.state = SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Nothing but lag."""
        self.end = SignalRate(signal.rate, signal.lag + self.num_steps, signal.short)
        return self.end

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Older steps first."""
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
        """The slowest branch's lag."""
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
        """Add them up."""
        first, *others = self.branches
        total: Tensor = first(x_BCT, step)
        for branch in others:
            total = total + branch(x_BCT, step)
        return total


def residual(*stages: StreamingStage) -> Sum:
    """A chain with a skip connection around it."""
    return Sum(Chain(), Chain(*stages))


def channels_last(modules: Sequence[Callable[[Tensor], Tensor]]) -> Pointwise:
    """Pointwise modules that want channels last, in a row."""

    def apply(x_BCT: Tensor) -> Tensor:
        x_BTC = x_BCT.transpose(1, 2)
        for module in modules:
            x_BTC = module(x_BTC)
        return x_BTC.transpose(1, 2)

    return Pointwise(apply)


def _stage(module: nn.Module) -> StreamingStage:
    assert isinstance(module, StreamingStage)
    return module

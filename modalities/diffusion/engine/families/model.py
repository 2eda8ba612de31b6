"""Runs a denoising model of any family for a batch of rows.

Owns the call: stacking conditioning, converting time to the model's unit, reading the output; and
the differences between model classes, as data. The model's own forward runs unchanged.

Legend: R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.layers.attention_order import attention_order
from triptych.core.runtime.layers.row_by_row import row_by_row
from triptych.modalities.diffusion.engine.parallel.sequence import SequenceParallel, TokenAxes
from triptych.modalities.diffusion.engine.tensor_pool import select_rows
from triptych.modalities.diffusion.wire import AdapterUse


@dataclass(frozen=True, slots=True)
class Blocks:
    """One list of blocks in a model. `streams`: the arguments its blocks return, in this order.

    Empty if they return only their first argument. `hidden`: the argument with the hidden states
    that the model's head reads; empty for the first. `row_axis`: the axis of rows in the hidden
    states of blocks that return only these.
    """

    name: str
    streams: tuple[str, ...] = ()
    hidden: str = ""
    row_axis: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserFamily:
    """A class of models: the names of its arguments, its units and its blocks."""

    sample: str = "hidden_states"
    time: str = "timestep"
    time_unit: float = 1.0  # the scheduler's time is divided by it
    time_offset: float = 0.0  # added to the scheduler's time
    time_is_exact: bool = False  # the time stays in float32, whatever the weights' type
    time_flips: bool = False  # the model takes 1 - time
    next_time: str = ""  # the argument with the next step's time, if the model takes it
    negates: bool = False  # the output points from noise to the clean sample
    sample_last: bool = False  # context comes before the sample, in the output also the text
    halves: bool = False  # the second half of output channels is a variance, dropped
    lists: frozenset[str] = frozenset()  # arguments passed as lists of rows, not stacked
    # Arguments whose rows vary in length, which are padded, and the argument that marks the real
    # tokens; empty if the conditioning has its own.
    ragged: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)  # stacking axes other than the first
    span: tuple[Blocks, ...] = ()  # the lists of blocks that a row may skip
    # Arguments with tokens, of the model or of its span's blocks, by which a run can be divided.
    tokens: Mapping[str, TokenAxes] = field(default_factory=dict)
    block_tokens: Mapping[str, TokenAxes] = field(default_factory=dict)
    local_attention: str = ""  # blocks' attention to an undivided text
    tap: str = ""  # the module whose output TeaCache compares, if not the first attention's input


class ContextPlace(Enum):
    """The place of a row's context among its latents, which are tokens `[T, C]`."""

    TOKENS = auto()  # more tokens, whose output is cut off
    CHANNELS = auto()  # more channels of every token


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """Model arguments of one guidance branch, besides latents and time.

    `rows`: tensors of the row, without a batch dimension, by argument name; a dotted name is an
    entry of an argument that is a mapping. `shared`: arguments that are the same for all rows of a
    batch, which `key` stands for: rows with different keys never share a run. `context`: what the
    model reads with the latents (edited images), joined at `context_place`. `adapters`: the checked
    adapters that act on this row.
    """

    rows: Mapping[str, Tensor]
    shared: Mapping[str, Any] = field(default_factory=dict)
    key: Hashable = ()
    context: Tensor | None = None
    context_place: ContextPlace = ContextPlace.TOKENS
    adapters: tuple[AdapterUse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows run by the model together: latents `[R, ...]`, times `[R]`, conditioning.

    `next_times`: those of the steps after, 0 after the last; needed by models with `next_time`.
    """

    samples: Tensor
    times: Tensor
    conditioning: Sequence[Conditioning]
    next_times: Tensor | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def tensors(self) -> list[Tensor]:
        """All per-row tensors, stacked. Rows must have equal shapes."""
        first = self.conditioning[0]
        stacked = [
            torch.stack([conditioning.rows[name] for conditioning in self.conditioning])
            for name in sorted(first.rows)
        ]
        contexts = [each.context for each in self.conditioning if each.context is not None]
        if contexts:
            stacked.append(torch.stack(contexts))
        next_times = [] if self.next_times is None else [self.next_times]
        return [self.samples, self.times, *next_times, *stacked]

    def over(self, tensors: Sequence[Tensor]) -> Batch:
        """This batch with other `tensors` in the same order."""
        samples, times, *stacked = tensors
        next_times = None if self.next_times is None else stacked.pop(0)
        names = sorted(self.conditioning[0].rows)
        has_context = len(stacked) > len(names)
        conditioning = [
            replace(
                each,
                rows={name: stack[row] for name, stack in zip(names, stacked, strict=False)},
                context=stacked[-1][row] if has_context else None,
            )
            for row, each in enumerate(self.conditioning)
        ]
        return Batch(samples=samples, times=times, conditioning=conditioning, next_times=next_times)

    def select(self, rows: Sequence[int]) -> Batch:
        """The rows at these indices, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        next_times = self.next_times
        return Batch(
            samples=select_rows(self.samples, rows),
            times=select_rows(self.times, rows),
            conditioning=[self.conditioning[row] for row in rows],
            next_times=None if next_times is None else select_rows(next_times, rows),
        )


class RowAdapters(Protocol):
    """Adapters that change a model for some rows of a run (`adapters.Adapters`)."""

    def key_of(self, uses: tuple[AdapterUse, ...], /) -> Hashable:
        """Rows with equal keys may share a run."""
        ...

    def applied(self, rows: Sequence[tuple[AdapterUse, ...]], /) -> AbstractContextManager[None]:
        """A context in which each row of a run has its adapters applied."""
        ...


class DenoiseModel:
    """A model and its family, run as a whole.

    `adapters` may be set later; without them, no row may use any. With `graphs`, runs are captured,
    except those with adapters. With `sequence`, this is one of several ranks that compute some
    tokens of every run.
    """

    adapters: RowAdapters | None = None
    graphs: CapturedSteps | None = None
    sequence: SequenceParallel | None = None

    def __init__(self, module: nn.Module, family: DenoiserFamily) -> None:
        self.module = module
        self.family = family
        weight = next(module.parameters())
        self.device = weight.device
        # A model may keep some weights in float32; its `dtype` is that of the others.
        self.dtype: torch.dtype = getattr(module, "dtype", weight.dtype)

    def batch_key(
        self, sample_shape: torch.Size, conditioning: Conditioning, *, is_exact: bool = False
    ) -> Hashable:
        """Rows with equal keys may share a batch.

        `is_exact`: arguments that could be padded must also have equal lengths, so that a row's
        result does not depend on the other rows. Divided tokens require the same.
        """
        may_differ = self.family.lists | self.family.ragged.keys()
        free = frozenset() if is_exact or self.sequence is not None else may_differ
        shapes = tuple(
            (name, tensor.shape)
            for name, tensor in sorted(conditioning.rows.items())
            if name not in free
        )
        context = None
        if conditioning.context is not None:
            context = conditioning.context.shape, conditioning.context_place
        adapted = self.adapters and self.adapters.key_of(conditioning.adapters)
        is_held = is_exact and bool(may_differ)
        return sample_shape, shapes, context, conditioning.key, is_held, adapted

    @torch.no_grad()
    def velocity(self, batch: Batch) -> Tensor:
        """The velocity of each row, `[R, ...]` like the samples, in float32."""
        return self.captured("velocity", self._velocity, batch)[0]

    def captured(
        self, name: str, run: Callable[..., Sequence[Tensor]], batch: Batch, *more: Tensor
    ) -> Sequence[Tensor]:
        """`run(batch, *more)`, replayed from a graph if possible. `name` identifies the run."""
        adapted = any(conditioning.adapters for conditioning in batch.conditioning)
        if self.graphs is None or adapted:
            return run(batch, *more)
        shape = batch.samples.shape[1:]
        keys = {self.batch_key(shape, each, is_exact=True) for each in batch.conditioning}
        if len(keys) > 1:
            return run(batch, *more)
        key = (name, len(batch), *keys, *[tensor.shape for tensor in more])
        tensors = batch.tensors()
        body = partial(_run_over, run, batch, len(tensors))
        outputs = self.graphs.run(key, body, [*tensors, *more])
        # Rows keep their outputs, which the next replay would overwrite.
        return run(batch, *more) if outputs is None else [output.clone() for output in outputs]

    def _velocity(self, batch: Batch) -> Sequence[Tensor]:
        arguments = self.arguments(batch)
        with self.adapters_applied(batch):
            return [self.read(self.module(**arguments), batch)]

    @contextmanager
    def adapters_applied(self, batch: Batch) -> Iterator[None]:
        """A context in which the rows' adapters act, and no row influences another."""
        rows = [conditioning.adapters for conditioning in batch.conditioning]
        attending = nullcontext() if self.sequence is None else self.sequence.attending()
        with attention_order(self.device), row_by_row(len(rows), self.device), attending:
            if not any(rows):
                yield
                return
            assert self.adapters is not None
            with self.adapters.applied(rows):
                yield

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """The keyword arguments of one run."""
        family = self.family
        arguments: dict[str, Any] = {
            family.sample: self._samples(batch),
            family.time: self._own_times(batch.times),
            "return_dict": False,
        }
        if family.next_time and batch.next_times is not None:
            arguments[family.next_time] = self._own_times(batch.next_times)
        for name in batch.conditioning[0].rows:
            rows = [conditioning.rows[name] for conditioning in batch.conditioning]
            _place(arguments, name, self._join(name, rows))
            mask = family.ragged.get(name)
            if mask and len({len(row) for row in rows}) > 1:
                masks = [torch.ones(len(row), dtype=torch.bool, device=row.device) for row in rows]
                arguments[mask] = pad_sequence(masks, batch_first=True)
        for name, value in batch.conditioning[0].shared.items():
            _place(arguments, name, value)
        sequence = self.sequence
        return arguments if sequence is None or sequence.is_in_blocks else sequence.split(arguments)

    def read(self, answer: Any, batch: Batch) -> Tensor:
        """The velocity from the output of a run."""
        output = answer[0] if isinstance(answer, tuple) else answer
        output = torch.stack(output) if isinstance(output, list) else output
        assert isinstance(output, Tensor)
        if self.sequence is not None and not self.sequence.is_in_blocks:
            output = self.sequence.gather(output)
        size = batch.samples.shape[1]
        if self.family.sample_last:
            output = output[:, -size:]
        elif batch.conditioning[0].context is not None or self.family.halves:
            output = output[:, :size]
        output = output.reshape(batch.samples.shape).float()
        return -output if self.family.negates else output

    def _own_times(self, times: Tensor) -> Tensor:
        """Times in the model's unit."""
        family = self.family
        own = (times.to(self.device, torch.float32) + family.time_offset) / family.time_unit
        own = 1 - own if family.time_flips else own
        return own if family.time_is_exact else own.to(self.dtype)

    def _samples(self, batch: Batch) -> Tensor | list[Tensor]:
        samples = batch.samples.to(self.device, self.dtype)
        context = [conditioning.context for conditioning in batch.conditioning]
        if context[0] is not None:
            joined = torch.stack([tensor for tensor in context if tensor is not None]).to(samples)
            is_wider = batch.conditioning[0].context_place is ContextPlace.CHANNELS
            parts = [joined, samples] if self.family.sample_last else [samples, joined]
            samples = torch.cat(parts, dim=-1 if is_wider else 1)
        return list(samples) if self.family.sample in self.family.lists else samples

    def _join(self, name: str, rows: list[Tensor]) -> Tensor | list[Tensor]:
        if name in self.family.lists:
            return rows
        if name in self.family.ragged:
            return pad_sequence(rows, batch_first=True)
        return torch.stack(rows, self.family.axes.get(name, 0))


def _run_over(
    run: Callable[..., Sequence[Tensor]], batch: Batch, num_rows: int, inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    return run(batch.over(inputs[:num_rows]), *inputs[num_rows:])


def _place(arguments: dict[str, Any], name: str, value: Any) -> None:
    outer, _, inner = name.partition(".")
    if inner:
        arguments.setdefault(outer, {})[inner] = value
    else:
        arguments[name] = value

"""A model whose blocks can be probed, run or skipped, by its own forward.

Owns a second view of the model, sharing all weights, in which each block is wrapped and the
current pass decides what the wrapper does. So one unchanged forward yields the parts of a run
(embed, probe, span, head), and no family needs its own copy:

    probe   up to the first block, or through it for its residual, then stop
    span    all blocks, recording their output
    head    no block: given hidden states replace their output

The original module is never changed, and a pass keeps its own state.

Legend: R rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.engine.caches.decisions import GateSignal
from triptych.modalities.diffusion.engine.families.model import (
    Batch,
    Blocks,
    DenoiseModel,
    DenoiserFamily,
)
from triptych.modalities.diffusion.engine.parallel.sequence import SequenceParallel
from triptych.modalities.diffusion.engine.tensor_pool import select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The result of a probe, per row: the gate's signal, and the hidden states before the span.

    `first`: the first block's output if it ran, to continue from.
    """

    base: Tensor
    signal: Tensor | None
    first: Any = None

    def select(self, rows: list[int]) -> Probed:
        """The results of the rows at these indices."""
        return Probed(
            base=select_rows(self.base, rows),
            signal=None if self.signal is None else select_rows(self.signal, rows),
            first=_select_rows(self.first, rows),
        )


class SpanModel(DenoiseModel):
    """A model that can run in parts. Raises `WeightsError` if its blocks are not found."""

    def __init__(self, module: nn.Module, family: DenoiserFamily) -> None:
        super().__init__(module, family)
        self._state = _PassState()
        wrappers: dict[str, nn.Module] = {}
        for blocks in family.span:
            listed = getattr(module, blocks.name, None)
            if not isinstance(listed, nn.ModuleList):
                raise WeightsError(
                    f"{type(module).__name__} has no list of blocks named {blocks.name}."
                )
            for index, block in enumerate(listed):
                wrappers[f"{blocks.name}.{index}"] = _BlockWrapper(block, blocks, self._state)
        if not wrappers:
            raise WeightsError(f"{type(module).__name__} has no blocks to skip.")
        self._state.num_blocks = len(wrappers)
        if family.tap:
            wrappers[family.tap] = _Tap(module.get_submodule(family.tap), self._state)
        self._view = replaced(module, wrappers)

    @torch.no_grad()
    def probe(self, batch: Batch, signal: GateSignal | None) -> Probed:
        """Run up to the first block, or through it for the signal `FIRST_RESIDUAL`."""
        found: dict[str, Any] = {}

        def visit(call: _Call, is_first: bool, is_last: bool) -> Any:
            output = None
            if is_first and signal is GateSignal.FIRST_RESIDUAL:
                output = call.run()
                found["first"] = call.rows_first(output)
                found["signal"] = call.hidden_of(output) - call.hidden
            elif is_first and signal is GateSignal.MODULATED_INPUT and not self.family.tap:
                found["signal"] = attention_input(call.wrapper.block, call.args, call.kwargs)
            if is_last:
                found["base"] = call.hidden if output is None else call.hidden_of(output)
                raise _PassDone
            return call.unchanged() if output is None else output

        def tap(output: Any) -> None:
            if signal is GateSignal.MODULATED_INPUT:
                found["signal"] = output[0] if isinstance(output, tuple) else output

        with suppress(_PassDone):
            self._run(batch, visit, tap)
        compared = found.get("signal")
        return Probed(
            base=found["base"],
            signal=None if compared is None else compared.reshape(len(batch), -1),
            first=found.get("first"),
        )

    @torch.no_grad()
    def span(self, batch: Batch, probed: Probed | None = None) -> tuple[Tensor, Tensor]:
        """Run the whole model: velocities, and the hidden states after the blocks, `[R, ...]`."""
        if probed is not None and probed.first is not None:
            return self._span(batch, probed.first)
        velocity, hidden = self.captured("span", self._span, batch)
        return velocity, hidden

    @torch.no_grad()
    def head(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Velocities from the hidden states after the blocks, `[R, ...]`."""
        return self.captured("head", self._head, batch, hidden)[0]

    def _velocity(self, batch: Batch) -> Sequence[Tensor]:
        return [self.read(self._run(batch, lambda call, *place: call.run()), batch)]

    def _span(self, batch: Batch, first: Any = None) -> tuple[Tensor, Tensor]:
        hidden: list[Tensor] = []

        def visit(call: _Call, is_first: bool, is_last: bool) -> Any:
            output = call.rows_back(first) if is_first and first is not None else call.run()
            if is_last:
                hidden.append(call.hidden_of(output))
            return output

        velocity = self.read(self._run(batch, visit), batch)
        return velocity, hidden[0]

    def _head(self, batch: Batch, hidden: Tensor) -> Sequence[Tensor]:
        placed = hidden.to(self.dtype)

        def visit(call: _Call, is_first: bool, is_last: bool) -> Any:
            return call.unchanged(placed if is_last else None)

        return [self.read(self._run(batch, visit), batch)]

    def _run(self, batch: Batch, visit: _Visit, tap: Callable[[Any], None] | None = None) -> Any:
        self._state.visit, self._state.tap, self._state.num_visited = visit, tap, 0
        self._state.sequence = self.sequence
        arguments = self.arguments(batch)
        try:
            with self.adapters_applied(batch):
                return self._view(**arguments)
        finally:
            self._state.visit = self._state.tap = None


class _PassDone(Exception):
    """Ends a pass early, once it has its result."""


@dataclass
class _Call:
    """One call of a block."""

    wrapper: _BlockWrapper
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.wrapper.block(*self.args, **self.kwargs)

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the block is given, `[R, ...]`."""
        hidden = self._arguments[self.wrapper.hidden]
        assert isinstance(hidden, Tensor)
        return hidden.movedim(self.wrapper.row_axis, 0)

    def unchanged(self, hidden: Tensor | None = None) -> Any:
        """The block's output if it changed nothing, or only the hidden states to `hidden`."""
        given = dict(self._arguments)
        if hidden is not None:
            given[self.wrapper.hidden] = self.rows_back(hidden)
        streams = self.wrapper.streams
        return tuple(given.get(name) for name in streams) if streams else given[self.wrapper.hidden]

    def hidden_of(self, output: Any) -> Tensor:
        """The hidden states in a block's output, `[R, ...]`."""
        streams = self.wrapper.streams
        hidden = output[streams.index(self.wrapper.hidden)] if streams else output
        assert isinstance(hidden, Tensor)
        return hidden.movedim(self.wrapper.row_axis, 0)

    def rows_first(self, output: Any) -> Any:
        """A block's output with rows on the first axis."""
        axis = self.wrapper.row_axis
        return output.movedim(axis, 0) if axis else output

    def rows_back(self, output: Any) -> Any:
        """The inverse of `rows_first`."""
        axis = self.wrapper.row_axis
        return output.movedim(0, axis) if axis else output

    def with_hidden(self, output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """The block's output with its hidden states changed."""
        hidden = change(self.hidden_of(output))
        if not (streams := self.wrapper.streams):
            return self.rows_back(hidden)
        return tuple(
            hidden if name == self.wrapper.hidden else value
            for name, value in zip(streams, output, strict=True)
        )

    def divided(self, sequence: SequenceParallel, is_first: bool) -> _Call:
        """The call for a rank's tokens. Streams between blocks are divided before the first."""
        bound = self.wrapper.signature.bind(*self.args, **self.kwargs)
        handed_on = self.wrapper.streams or (self.wrapper.hidden,)
        if is_first:
            bound.arguments = sequence.split(bound.arguments)
        else:
            bound.arguments = sequence.narrow(bound.arguments, besides=handed_on)
        return _Call(self.wrapper, bound.args, bound.kwargs)

    @property
    def _arguments(self) -> Mapping[str, Any]:
        return self.wrapper.signature.bind(*self.args, **self.kwargs).arguments


# Returns a block's output in a pass; the flags mark the first and the last block.
_Visit = Callable[[_Call, bool, bool], Any]


@dataclass
class _PassState:
    """The current pass, shared by all wrappers. Blocks are counted in calling order."""

    num_blocks: int = 0
    num_visited: int = 0
    visit: _Visit | None = None
    tap: Callable[[Any], None] | None = None
    sequence: SequenceParallel | None = None


class _BlockWrapper(nn.Module):
    """A block in the view, whose calls the current pass handles."""

    def __init__(self, block: nn.Module, blocks: Blocks, state: _PassState) -> None:
        super().__init__()
        self.block = block
        self.signature = inspect.signature(block.forward)
        self.streams = blocks.streams
        self.hidden = blocks.hidden or next(iter(self.signature.parameters))
        self.row_axis = blocks.row_axis
        self._state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        assert state.visit is not None, "the view runs only inside a pass"
        state.num_visited += 1
        is_first, is_last = state.num_visited == 1, state.num_visited == state.num_blocks
        call, sequence = _Call(self, args, kwargs), state.sequence
        if sequence is None or not sequence.is_in_blocks:
            return state.visit(call, is_first, is_last)
        output = state.visit(call.divided(sequence, is_first), is_first, is_last)
        return call.with_hidden(output, sequence.gather) if is_last else output

    def __getattr__(self, name: str) -> Any:
        """Forward attributes that a model reads from its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class _Tap(nn.Module):
    """A module whose output the pass reads."""

    def __init__(self, module: nn.Module, state: _PassState) -> None:
        super().__init__()
        self.module = module
        self._state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        if self._state.tap is not None:
            self._state.tap(output)
        return output


class _AttentionCapture(nn.Module):
    """Replaces an attention layer: captures its input and ends the run."""

    captured: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.captured = args[0] if args else next(iter(kwargs.values()))
        raise _PassDone


def attention_input(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a block's first attention layer: normed and modulated by the time.

    Raises `WeightsError` if the block has no attention layer.
    """
    capture = _AttentionCapture()
    view = replaced(block, {_first_attention(block): capture})
    with suppress(_PassDone):
        view(*args, **kwargs)
    assert capture.captured is not None
    return capture.captured


def replaced(module: nn.Module, substitutes: Mapping[str, nn.Module]) -> nn.Module:
    """A view of a module with some submodules, by dotted path, replaced. All else is shared."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    here: dict[str, dict[str, nn.Module]] = {}
    for path, substitute in substitutes.items():
        name, _, rest = path.partition(".")
        here.setdefault(name, {})[rest] = substitute
    for name, inner in here.items():
        child = module._modules[name]
        assert child is not None
        view._modules[name] = inner[""] if "" in inner else replaced(child, inner)
    return view


def _first_attention(block: nn.Module) -> str:
    for path, module in block.named_modules():
        kind = type(module).__name__.lower()
        if path and ("attention" in kind or "attn" in kind):
            return str(path)
    raise WeightsError(
        f"{type(block).__name__} has no attention layer whose inputs could be compared."
    )


def _select_rows(output: Any, rows: list[int]) -> Any:
    """The rows at these indices of a block's output, of any structure."""
    if isinstance(output, tuple):
        return tuple(_select_rows(part, rows) for part in output)
    if isinstance(output, Tensor):
        return select_rows(output, rows)
    return output

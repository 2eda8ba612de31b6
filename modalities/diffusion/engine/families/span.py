"""A model whose blocks can be probed, run or skipped, by its own forward.

Owns the way in: a second view of the model, sharing every weight, in which each block is a station
that asks the pass under way what to do. So the parts of a run (embed, probe, span, head) come of
one untouched forward, and no family needs its own copy of one:

    probe   up to the blocks, the first block if its residual is wanted, then out
    span    all blocks, noting what they leave behind
    head    no block: what they would have left is put in their place

The original module is never changed, and a pass keeps its state to itself.

Legend: R rows.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
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
from triptych.modalities.diffusion.engine.tensor_pool import picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe found, per row: the gate's signal, and the hidden states the span starts from.

    `first`: the first block's output where it was run, to go on from there.
    """

    base: Tensor
    signal: Tensor | None
    first: Any = None

    def select(self, rows: list[int]) -> Probed:
        """Some of the rows."""
        return Probed(
            base=picked(self.base, rows),
            signal=None if self.signal is None else picked(self.signal, rows),
            first=_take(self.first, rows),
        )


class SpanModel(DenoiseModel):
    """A model that can be asked in parts. Raises `WeightsError` if its blocks are not found."""

    def __init__(self, module: nn.Module, family: DenoiserFamily) -> None:
        super().__init__(module, family)
        self._route = _Route()
        stations: dict[str, nn.Module] = {}
        for blocks in family.span:
            for index, block in enumerate(_blocks_of(module, blocks.name)):
                stations[f"{blocks.name}.{index}"] = _Station(block, blocks, self._route)
        if not stations:
            raise WeightsError(f"{type(module).__name__} has no blocks that could be skipped.")
        self._num_stations = len(stations)
        if family.tap:
            stations[family.tap] = _Tap(module.get_submodule(family.tap), self._route)
        self._view = replaced(module, stations)

    @torch.no_grad()
    def probe(self, batch: Batch, signal: GateSignal | None) -> Probed:
        """Up to the blocks; after the first block with `FIRST_RESIDUAL`, which runs it."""
        visitor = _ProbeVisitor(signal, self._num_stations, taps=bool(self.family.tap))
        with suppress(_Enough):
            self._run(batch, visitor)
        assert visitor.base is not None
        found = visitor.signal
        return Probed(
            base=visitor.base,
            signal=None if found is None else found.reshape(len(batch), -1),
            first=visitor.first,
        )

    @torch.no_grad()
    def span(self, batch: Batch, probed: Probed | None = None) -> tuple[Tensor, Tensor]:
        """The whole model: velocities, and the hidden states after the blocks, `[R, ...]`."""
        visitor = _Compute(None if probed is None else probed.first, self._num_stations)
        velocity = self.read(self._run(batch, visitor), batch)
        assert visitor.hidden is not None
        return velocity, visitor.hidden

    @torch.no_grad()
    def head(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Velocities of rows whose blocks would have left `hidden`, `[R, ...]`."""
        visitor = _Skip(hidden.to(self.dtype), self._num_stations)
        return self.read(self._run(batch, visitor), batch)

    def _run(self, batch: Batch, visitor: _Visitor) -> Any:
        self._route.visitor = visitor
        try:
            with self.acting(batch):
                return self._view(**self.arguments(batch))
        finally:
            self._route.visitor = None


class _Enough(Exception):
    """The pass has what it came for."""


@dataclass
class _Call:
    """One call of a block, its hidden states by name."""

    station: _Station
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.station.block(*self.args, **self.kwargs)

    @property
    def hidden(self) -> Tensor:
        hidden = self._arguments[self.station.hidden]
        assert isinstance(hidden, Tensor)
        return hidden

    def unchanged(self, hidden: Tensor | None = None) -> Any:
        """What the block would return if it did nothing, or left these hidden states."""
        given = {**self._arguments, **({} if hidden is None else {self.station.hidden: hidden})}
        streams = self.station.streams
        return tuple(given.get(name) for name in streams) if streams else given[self.station.hidden]

    def hidden_of(self, output: Any) -> Tensor:
        streams = self.station.streams
        hidden = output[streams.index(self.station.hidden)] if streams else output
        assert isinstance(hidden, Tensor)
        return hidden

    @property
    def _arguments(self) -> Mapping[str, Any]:
        return self.station.signature.bind(*self.args, **self.kwargs).arguments


class _Visitor(ABC):
    """What one pass does at each station. Stations are counted as they come."""

    def __init__(self, num_stations: int) -> None:
        self._left = num_stations
        self._is_first = True

    def visit(self, call: _Call) -> Any:
        is_first, self._is_first = self._is_first, False
        self._left -= 1
        return self.pass_by(call, is_first=is_first, is_last=self._left == 0)

    @abstractmethod
    def pass_by(self, call: _Call, *, is_first: bool, is_last: bool) -> Any:
        """What the station answers."""

    def tap(self, output: Any) -> None:  # noqa: B027 - most passes look at none
        """A tapped module's output."""


class _ProbeVisitor(_Visitor):
    def __init__(self, signal: GateSignal | None, num_stations: int, *, taps: bool) -> None:
        super().__init__(num_stations)
        self._wanted = signal
        self._taps = taps
        self.signal: Tensor | None = None
        self.base: Tensor | None = None
        self.first: Any = None

    def pass_by(self, call: _Call, *, is_first: bool, is_last: bool) -> Any:
        output = None
        if is_first and self._wanted is GateSignal.FIRST_RESIDUAL:
            output = self.first = call.run()
            self.signal = call.hidden_of(output) - call.hidden
        elif is_first and self._wanted is GateSignal.MODULATED_INPUT and not self._taps:
            self.signal = attention_input(call.station.block, call.args, call.kwargs)
        if is_last:
            self.base = call.hidden if output is None else call.hidden_of(output)
            raise _Enough
        return call.unchanged() if output is None else output

    def tap(self, output: Any) -> None:
        if self._wanted is GateSignal.MODULATED_INPUT:
            self.signal = output[0] if isinstance(output, tuple) else output


class _Compute(_Visitor):
    def __init__(self, first: Any, num_stations: int) -> None:
        super().__init__(num_stations)
        self._first = first
        self.hidden: Tensor | None = None

    def pass_by(self, call: _Call, *, is_first: bool, is_last: bool) -> Any:
        output = self._first if is_first and self._first is not None else call.run()
        if is_last:
            self.hidden = call.hidden_of(output)
        return output


class _Skip(_Visitor):
    def __init__(self, hidden: Tensor, num_stations: int) -> None:
        super().__init__(num_stations)
        self._hidden = hidden

    def pass_by(self, call: _Call, *, is_first: bool, is_last: bool) -> Any:
        return call.unchanged(self._hidden if is_last else None)


@dataclass
class _Route:
    """Where stations find the pass under way."""

    visitor: _Visitor | None = None


class _Station(nn.Module):
    """A block's place in the view."""

    def __init__(self, block: nn.Module, blocks: Blocks, route: _Route) -> None:
        super().__init__()
        self.block = block
        self.signature = inspect.signature(block.forward)
        self.streams = blocks.streams
        self.hidden = blocks.hidden or next(iter(self.signature.parameters))
        self._route = route

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        visitor = self._route.visitor
        assert visitor is not None, "the view runs only inside a pass"
        return visitor.visit(_Call(self, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        """What a model reads of its blocks beside calling them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class _Tap(nn.Module):
    """A module whose output the pass looks at."""

    def __init__(self, module: nn.Module, route: _Route) -> None:
        super().__init__()
        self.module = module
        self._route = route

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        if self._route.visitor is not None:
            self._route.visitor.tap(output)
        return output


class _AttentionCapture(nn.Module):
    """Stands where an attention layer stood, takes what it is given, and ends the run."""

    heard: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.heard = args[0] if args else next(iter(kwargs.values()))
        raise _Enough


def attention_input(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a block's first attention layer is given: its input, normed and modulated by the time.

    Raises `WeightsError` if the block has no attention layer.
    """
    listener = _AttentionCapture()
    view = replaced(block, {_first_attention(block): listener})
    with suppress(_Enough):
        view(*args, **kwargs)
    assert listener.heard is not None
    return listener.heard


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
        if path and _is_attention(module):
            return str(path)
    raise WeightsError(f"{type(block).__name__} has no attention layer to compare inputs of.")


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and hasattr(module, "forward")


def _blocks_of(module: nn.Module, name: str) -> nn.ModuleList:
    blocks = getattr(module, name, None)
    if not isinstance(blocks, nn.ModuleList):
        raise WeightsError(f"{type(module).__name__} has no list of blocks named {name}.")
    return blocks


def _take(output: Any, rows: list[int]) -> Any:
    """Some rows of a block's output, whatever its structure."""
    if isinstance(output, tuple):
        return tuple(_take(part, rows) for part in output)
    if isinstance(output, Tensor):
        return picked(output, rows)
    return output

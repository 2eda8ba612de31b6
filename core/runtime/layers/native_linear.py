"""Replacements for the linear layers of other libraries' models, with weights held elsewhere.

Owns the replacement of `torch.nn.Linear` by our own layer, the one on our projection kernel, and
the walk that finds replaceable layers. Torch's own results depend on the number of rows, on some
processors for any number and on all for a single row; those of our kernel never do. Knows no model.

Shapes: I inputs, O outputs, T tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from inspect import getsource, unwrap
from types import FunctionType

import torch
from torch import Tensor, nn

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.linear import Linear

_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that pass the weights of their inner layers to a kernel of torch."""
_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|data_ptr|is_meta))")
"""The code of a module that reads values of an inner layer's weight."""


def nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A placeholder of a weight held elsewhere: no memory, and NaN, which shows if it is used."""
    value = torch.full((), torch.nan, dtype=dtype, device=device)
    return nn.Parameter(value.expand(shape), requires_grad=False)


class HeldLinear(nn.Linear):
    """Computes `linear`, for inference only, with its weight in `held`.

    `weight` keeps type, shape and device, but is a placeholder.
    """

    def __init__(self, linear: nn.Linear, held: Linear) -> None:
        nn.Module.__init__(self)  # not `Linear`'s, which would allocate
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._held = held
        held.bias_O = linear.bias
        self.weight = nothing((self.out_features, self.in_features), held.dtype, held.device)
        self.bias = linear.bias
        self.train(linear.training)

    @property
    def held(self) -> Linear:
        """The projection that holds the weight."""
        return self._held

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - `Linear`'s own name for it
        """Compute as `Linear` does. Raises `RuntimeError` for another type than the weight's."""
        if input.dtype is not self._held.dtype:
            raise RuntimeError(f"linear: {input.dtype} times weights of {self._held.dtype}")
        x_TI = input.reshape(-1, self.in_features).contiguous()
        return self._held(x_TI).view(*input.shape[:-1], self.out_features)


class NativeLinear(HeldLinear):
    """A linear layer on our kernel. Only the packed weight stays in memory."""

    def __init__(self, linear: nn.Linear, native: NativeKernels) -> None:
        held = Linear.of(linear.weight.detach())
        held.prepare(native)
        super().__init__(linear, held)


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """The layers that share one weight, each with its parent and its full name."""

    layers: tuple[nn.Module, ...]
    parents: tuple[nn.Module, ...]
    names: tuple[str, ...]

    def replace(self, stand_in: nn.Module) -> None:
        """Replace all of them by a module."""
        for parent, name in zip(self.parents, self.names, strict=True):
            setattr(parent, name.rpartition(".")[2], stand_in)


@cache
def _names_read(kind: object) -> frozenset[str]:
    """The inner layers whose weights a module's code reads, such as Mamba's projection of steps."""
    assert isinstance(kind, type)
    own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    methods = [value for each in own for value in vars(each).values() if callable(value)]
    return frozenset(name for each in methods for name in _READ.findall(_code_with_weights(each)))


def _code_with_weights(method: Callable[..., object]) -> str:
    """The source of a method that names weights when it computes, if it can be read."""
    code = unwrap(method)
    is_maker = getattr(code, "__name__", "").startswith(("__init", "_init", "init", "tie", "fuse"))
    if isinstance(code, FunctionType) and "weight" in code.__code__.co_names and not is_maker:
        with suppress(OSError):
            return getsource(code)
    return ""


def plain_layers(module: nn.Module, kind: type[nn.Module]) -> Iterator[SharedWeight]:
    """The weights in a module that only plain layers of a `kind` read.

    Excluded are subclasses, fused layers of torch, and weights that other modules also read, such
    as tied embeddings.
    """
    users: defaultdict[int, set[nn.Module]] = defaultdict(set)
    places: defaultdict[int, list[tuple[nn.Module, nn.Module, str]]] = defaultdict(list)
    for path, parent in module.named_modules():
        for parameter in parent._parameters.values():
            if parameter is not None:
                users[_identity(parameter)].add(parent)
        reader: type = type(parent)
        read = _names_read(reader)
        for name, child in parent._modules.items():
            is_read = issubclass(reader, _READS_WEIGHTS) or name in read
            if is_plain(child, kind) and not is_read:
                assert child is not None
                weight = child._parameters["weight"]
                assert weight is not None
                full_name = f"{path}.{name}" if path else name
                places[_identity(weight)].append((child, parent, full_name))
    for key, found in places.items():
        layers, parents, names = zip(*found, strict=True)
        if users[key] == set(layers):
            yield SharedWeight(layers, parents, names)


def pack_linears(module: nn.Module, native: NativeKernels | None) -> None:
    """Replace the linear layers inside a loaded module by `NativeLinear`s, one by one.

    Layers keep weights that the kernels do not support, or that other layers share.
    """
    if native is None:
        return
    found = list(plain_layers(module, nn.Linear))
    while found:
        weight = found.pop()
        layer, *others = set(weight.layers)
        assert isinstance(layer, nn.Linear)
        if not others and _takes(native, layer):
            weight.replace(NativeLinear(layer, native))


def _identity(parameter: Tensor) -> int:
    """The same for views of one memory; parameters without memory are distinct."""
    return parameter.data_ptr() or id(parameter)


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether it is exactly of the `kind`: no subclass, no weight computed at each call."""
    return (
        type(module) is kind
        and module._parameters.get("weight") is not None
        and "forward" not in vars(module)
        and not module._forward_pre_hooks
        and not module._forward_hooks
    )


def _takes(native: NativeKernels, linear: nn.Linear) -> bool:
    weight, bias = linear.weight, linear.bias
    has_like_bias = bias is None or (bias.dtype is weight.dtype and bias.is_contiguous())
    return has_like_bias and native.can_pack(weight)

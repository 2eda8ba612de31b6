"""A GPU that is not there: steps run on it from end to end, compute nothing, and show their faults.

Tensors on `cuda` are fake (torch's FakeTensorMode): they have shapes, types and strides and no
values, so mixing devices, reading a value and making a shape of one all raise. Tensors of the host
are real. Beyond that a step is watched for what would make the host wait for a real GPU: copies
that are not from or to pinned memory, or are not asynchronous, and events that are waited for. Of a
result, the first event that is waited for must let the thread sleep. A graph must be replayed on a
stream of the priority that it was captured with.

What is copied back arrives when the event recorded behind it has been waited for, as on a GPU:
zeros, and true. Until then the memory of the host holds values that no test would take for sound.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_NONE = object()
_MAX_FOLLOWED = 4096
_SOURCES = re.compile("/(triptych|transformers|diffusers|torchaudio)/")
PRODUCTS = frozenset(
    {f"aten::{name}" for name in ("mm", "addmm", "bmm", "linear", "matmul")}
    | {"aten::_scaled_mm", "aten::_grouped_mm", "aten::_flash_attention_forward"}
)
_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})
_INDEXED = frozenset({"aten::index", "aten::index_put_", "aten::index_put"})
_WHOLE = frozenset({"aten::scaled_dot_product_attention"})
"""Composed operations that a GPU has as one: what they are made of elsewhere does not count."""


@dataclass(eq=False)
class FakeCuda:
    """`with FakeCuda() as gpu`: `torch.device("cuda")` works inside, and its tensors are fake.

    `faults` are the waits found in steps, each with the line of ours that made it. `deliver` makes
    what was copied to the host from zeros. `kernels` are those of ours that were called, `products`
    those of torch's libraries in steps. Bytes
    count the storages alive on the device.
    """

    free_bytes: int = 64 * 2**30
    deliver: Callable[[torch.Tensor], object] = lambda arrived: None
    faults: list[str] = field(default_factory=list)
    num_read: int = 0
    num_replays: int = 0
    kernels: set[str] = field(default_factory=set)
    products: set[str] = field(default_factory=set)
    live_bytes: int = 0
    peak_bytes: int = 0
    phase: Literal["free", "launch", "result"] = "free"
    _copies: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    _streams: list[_Stream] = field(default_factory=list)
    _num_recorded: int = 0
    _num_done: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _known: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    _pinned: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def __enter__(self) -> FakeCuda:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        self._streams = [_Stream(CUDA)]
        for name, stand_in in self._driver().items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(nn.Module, "_apply", _apply)
        patch.setattr(nn.RNNBase, "flatten_parameters", lambda module: None)
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(_Watch(self))
        return self

    def _driver(self) -> dict[str, Any]:
        """What of `torch.cuda` would ask a driver. A graph is captured, and replays nothing."""
        return {
            "CUDAGraph": type("CUDAGraph", (_Graph,), {"gpu": self}),
            "Event": type("Event", (_Event,), {"gpu": self}),
            "Stream": _Stream,
            "current_stream": lambda device: self._streams[-1],
            "device": lambda device: nullcontext(),
            "get_device_capability": lambda *device: (9, 0),
            "get_device_properties": lambda device: _PROPERTIES,
            "graph_pool_handle": lambda: (0, 0),
            "is_bf16_supported": lambda *given: True,
            "mem_get_info": lambda device: (self.free_bytes,) * 2,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: self.live_bytes,
            "memory_snapshot": lambda *pool: [],
            "stream": self._on_stream,
            "synchronize": lambda device: self.fault("it is waited for"),
        }

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def _on_stream(self, stream: _Stream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    @property
    def priority(self) -> int:
        """The priority of the current stream."""
        return self._streams[-1].priority

    @contextmanager
    def launch(self) -> Iterator[None]:
        """While a step is launched nothing may wait. `peak_bytes` begins again."""
        self.peak_bytes = self.live_bytes
        with self._in("launch"):
            yield

    def result(self) -> AbstractContextManager[None]:
        """While a step's result is fetched, events may be waited for, and nothing else."""
        return self._in("result")

    @contextmanager
    def _in(self, phase: Literal["launch", "result"]) -> Iterator[None]:
        self.phase = phase
        try:
            yield
        finally:
            self.phase = "free"

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a storage of the device for as long as it lives."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = storage.nbytes()
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, num_bytes)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, whose memory is pinned from now on."""
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is."""
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage() in self._pinned

    def bring(self, host: torch.Tensor) -> None:
        """A copy to pinned memory is under way."""
        host.fill_(torch.nan if host.is_floating_point() else -(host.dtype is not torch.bool))
        self._copies.append((host, self._num_recorded))

    def record(self) -> int:
        """The next place in the order of the device's work."""
        self._num_recorded += 1
        return self._num_recorded

    def is_done(self, place: int) -> bool:
        """Whether the host knows that the work up to a place is done."""
        return place <= self._num_done

    def wait(self, place: int) -> None:
        """The host waits for the work up to a place, unless it knows already that it is done."""
        if self.phase == "launch" and not self.is_done(place):
            self.fault("the host waits for an event")
        self._num_done = max(self._num_done, place)
        arrived = [host for host, at in self._copies if at < place]
        self._copies = self._copies[len(arrived) :]
        self.num_read += len(arrived)
        with torch.inference_mode():
            for host in arrived:
                host.fill_(host.dtype is torch.bool)
                self.deliver(host)

    def fault(self, what: str) -> None:
        """Note a fault and where it comes from, ours or a library's; outside of steps is none."""
        if self.phase == "free":
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None and not _SOURCES.search(frame.f_code.co_filename):
            frame = frame.f_back
        at = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
        self.faults.append(f"{at}: {what}")

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


class _Stream:
    """`torch.cuda.Stream`: its work is in the order of the host's."""

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.device, self.priority = device, priority

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...


class _Graph:
    """`torch.cuda.CUDAGraph`: its kernels keep the priority of the stream they are captured on."""

    gpu: ClassVar[FakeCuda]

    def capture_begin(self, **options: Any) -> None:
        self._priority = self.gpu.priority

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.gpu.num_replays += 1
        if self._priority != self.gpu.priority:
            self.gpu.fault("a graph is replayed on a stream of another priority")

    def reset(self) -> None: ...


_PROPERTIES = SimpleNamespace(name="Fake", multi_processor_count=132, major=9, minor=0)


class _Event:
    """`torch.cuda.Event`: a place in the order of the device's work."""

    gpu: ClassVar[FakeCuda]

    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self._place = 0
        self._is_blocking = blocking

    def record(self, stream: object = None) -> None:
        self._place = self.gpu.record()

    def synchronize(self) -> None:
        if self.gpu.phase == "result" and not (self._is_blocking or self.query()):
            self.gpu.fault("the host waits actively for the end of a step")
        self.gpu.wait(self._place)

    def query(self) -> bool:
        return self.gpu.is_done(self._place)

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


class _Watch(TorchDispatchMode):
    """Sees each operation first: runs those of the host for real, and looks at the others."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self._gpu = gpu
        self._numbers = _KnownNumbers()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        is_of_host = FakeTensor not in types and not any(map(_is_cuda, (*args, *options.values())))
        if "pin_memory" in func.name() or options.get("pin_memory"):
            return self._gpu.pin(_on_host(_pinned, args, options))
        if is_of_host:
            return _on_host(func, args, options)
        if _is_composed(func):
            with self:
                return func.decompose(*args, **options)
        return self._on_device(func, args, options)

    def _on_device(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        name = _name(func)
        if func.namespace == "triptych":
            self._gpu.kernels.add(name.removeprefix("triptych::"))
        if name in PRODUCTS and self._gpu.phase == "launch":
            self._gpu.products.add(name)
        if name == "aten::_local_scalar_dense" and (value := self._read(args[0])) is not None:
            return _on_host(torch.Tensor.item, (value,))
        if name in _COPIES and (copied := self._copied(name, args, options)) is not None:
            return copied
        if name in _INDEXED and any(_is_host(leaf) for leaf in tree_leaves(args[1:])):
            self._gpu.fault("an index or a value of the host is copied, and waited for")
        try:
            with _attention_of_fakes() if name in _WHOLE else nullcontext():
                made = func(*args, **options)
        except DynamicOutputShapeException:
            if (value := self._numbers.of(func, args, options)) is None:
                raise
            self._gpu.fault("a size depends on values")
            made = tree_map(lambda each: args[0].new_empty(each.shape, dtype=each.dtype), value)
        self._numbers.follow(func, args, options, made)
        for leaf in (made,) if isinstance(made, torch.Tensor) else tree_leaves(made):
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
                self._gpu.hold(leaf)
        return made

    def _read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What the host reads of a tensor; None where it cannot be known, which then raises."""
        value = self._numbers.get(tensor)
        if value is None and self._gpu.phase == "free":
            return _on_host(torch.zeros, ((),), {"dtype": tensor.dtype})
        self._gpu.fault("a value is read")
        return value

    def _copied(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a copy between host and device yields; None for one that the fakes can do."""
        is_new = name == "aten::_to_copy"
        source = args[0] if is_new else args[1]
        target = options.get("device", source.device) if is_new else args[0].device
        is_asynchronous = options.get("non_blocking", not is_new and args[2:] == (True,))
        if source.device.type == target.type or not source.numel():
            return None
        if target.type == "cuda":
            if not (is_asynchronous and self._gpu.is_pinned(source)):
                self._gpu.fault("a copy from memory that is not pinned, or waited for")
            return None
        if is_new or not (is_asynchronous and self._gpu.is_pinned(args[0])):
            self._gpu.fault("a copy to the host that is waited for")
            return None
        _on_host(self._gpu.bring, (args[0],))
        return args[0]


class _KnownNumbers:
    """What is in a few whole numbers of the device that come from the host alone.

    Libraries keep sizes in tensors. A step that reads one is at fault, but can go on.
    """

    def __init__(self) -> None:
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value: torch.Tensor | None = self._values.get(tensor)
        return value

    def follow(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], made: Any) -> None:
        """Remember what is made of numbers that are known."""
        results = self.of(func, args, options)
        if results is None:
            return
        for tensor, value in zip(tree_leaves(made), tree_leaves(results), strict=True):
            if isinstance(tensor, FakeTensor) and _is_small(value):
                self._values[tensor] = value

    def of(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What an operation makes of known numbers; None where they are not known."""
        if any(isinstance(arg, FakeTensor) and arg not in self._values for arg in args):
            return None
        leaves, spec = tree_flatten((args, options))
        found = [self._known(leaf) for leaf in leaves]
        if any(leaf is None for leaf in found) or not any(map(_is_tensor, found)):
            return None
        given, named = tree_unflatten([None if leaf is _NONE else leaf for leaf in found], spec)
        return _on_host(func, given, named)

    def _known(self, leaf: Any) -> Any:
        """An argument as the host has it; None for a tensor whose values are not known."""
        if isinstance(leaf, FakeTensor):
            return self.get(leaf)
        if isinstance(leaf, torch.Tensor):
            return leaf if _is_small(leaf) else None
        if leaf is None:
            return _NONE
        return _CPU if _is_cuda(leaf) else leaf


def _attention_of_fakes() -> AbstractContextManager[object]:
    """Without cuDNN's attention, which asks a driver whether it takes the inputs."""
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _is_small(value: torch.Tensor) -> bool:
    return value.numel() <= _MAX_FOLLOWED and (value.dim() == 0 or not value.is_floating_point())


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _on_host(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    with unset_fake_temporarily():
        return func(*args, **(kwargs or {}))


def _pinned(first: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    """A copy of a tensor of the host, or memory of a size or like a tensor of the device."""
    if isinstance(first, torch.Tensor) and not isinstance(first, FakeTensor):
        return first.clone()
    shape = first.shape if isinstance(first, torch.Tensor) else first
    return torch.zeros(shape, dtype=dtype or getattr(first, "dtype", None))


@cache
def _name(func: Any) -> str:
    return str(func.name().split(".")[0])


@cache
def _is_composed(func: Any) -> bool:
    """Whether an operation is nothing but others, which are then looked at one by one."""
    has_kernel: bool = func.namespace != "prim" and (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
    return has_kernel and _name(func) not in _WHOLE


def _apply(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` without exchanging what tensors hold, which fakes do not take."""
    made: dict[int, Any] = {}
    for each in module.modules():
        for kept in (each._parameters, each._buffers):
            for name, tensor in kept.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with torch.no_grad():
                        new = fn(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (
                        nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    )
                kept[name] = made[id(tensor)]
    return module


def _is_cuda(leaf: object) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def _is_host(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"

"""A GPU that is not there: steps run on it from end to end, compute nothing, and show their faults.

Tensors on `cuda` are fake (torch's FakeTensorMode): they have shapes, types and strides and no
values, so mixing devices, reading a value and making a shape of one all raise. Tensors of the host
are real. Beyond that a step is watched for what would make the host wait for a real GPU: copies
that are not from or to pinned memory, or are not asynchronous, and events that are waited for.

What is copied back arrives when the event recorded behind it has been waited for, as on a GPU:
zeros, and true. Until then the memory of the host holds values that no test would take for sound.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})
_INDEXED = frozenset({"aten::index", "aten::index_put_", "aten::index_put"})
_WHOLE = frozenset({"aten::scaled_dot_product_attention"})
"""Composed operations that a GPU has as one: what they are made of elsewhere does not count."""


@dataclass(eq=False)
class FakeCuda:
    """`with FakeCuda() as gpu`: `torch.device("cuda")` works inside, and its tensors are fake.

    `faults` are the waits found in steps, each with the line of ours that made it. `deliver` makes
    what was copied to the host from zeros. Bytes count the storages alive on the device.
    """

    free_bytes: int = 64 * 2**30
    deliver: Callable[[torch.Tensor], object] = lambda arrived: None
    faults: list[str] = field(default_factory=list)
    num_reads: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    is_in_step: bool = False
    _copies: list[torch.Tensor] = field(default_factory=list)
    _num_arrived: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _known: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    _pinned: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def __enter__(self) -> FakeCuda:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch, "Event", type("Event", (_Event,), {"gpu": self}))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes,) * 2)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *given: True)
        patch.setattr(torch.cuda, "synchronize", lambda device: self._wait("synchronize"))
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(_Watch(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Between launch and result: nothing may wait. `peak_bytes` begins anew."""
        self.is_in_step, self.peak_bytes = True, self.live_bytes
        try:
            yield
        finally:
            self.is_in_step = False

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
        self._copies.append(host)

    def arrive(self, num_copies: int) -> None:
        """The host waits for the first copies."""
        if self.is_in_step:
            self.fault("the host waits for an event")
        self.num_reads += 1
        with torch.inference_mode():
            for host in self._copies[self._num_arrived : num_copies]:
                host.fill_(host.dtype is torch.bool)
                self.deliver(host)
        self._num_arrived = max(self._num_arrived, num_copies)

    def fault(self, what: str) -> None:
        """Note a fault of the step with the line of ours that it comes from."""
        ours = [f for f in traceback.extract_stack() if "/triptych/" in f.filename]
        at = f"{ours[-1].filename.split('/triptych/')[-1]}:{ours[-1].lineno}" if ours else "?"
        self.faults.append(f"{at}: {what}")

    @property
    def num_copies(self) -> int:
        """Copies to the host so far."""
        return len(self._copies)

    def _wait(self, what: str) -> None:
        if self.is_in_step:
            self.fault(what)

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


class _Event:
    """`torch.Event`: it knows which copies went before it."""

    gpu: ClassVar[FakeCuda]

    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        self._num_copies = 0

    def record(self, stream: object = None) -> None:
        self._num_copies = self.gpu.num_copies

    def synchronize(self) -> None:
        self.gpu.arrive(self._num_copies)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


class _Watch(TorchDispatchMode):
    """Sees each operation first: runs those of the host for real, and looks at the others."""

    def __init__(self, gpu: FakeCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name, leaves = func.name().split(".")[0], tree_leaves((args, options))
        if "pin_memory" in name:
            return self._gpu.pin(self._on_host(torch.clone, args[:1]))
        if FakeTensor not in types and not any(_is_cuda(leaf) for leaf in leaves):
            return self._on_host(func, args, options)
        if options.get("pin_memory"):  # made like a tensor of the device, for the host
            made = self._on_host(torch.zeros, (args[0].shape,), {"dtype": args[0].dtype})
            return self._gpu.pin(made)
        if name not in _WHOLE and _is_composed(func):
            with self:
                return func.decompose(*args, **options)
        if name in _COPIES and (copied := self._copied(func, args, options)) is not None:
            return copied
        if name in _INDEXED and any(_is_host(leaf) and leaf.dim() for leaf in leaves):
            self._fault("an index of the host is copied, and waited for")
        made = func(*args, **options)
        for leaf in tree_leaves(made):
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
                self._gpu.hold(leaf)
        return made

    def _copied(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a copy between host and device yields; None for one that the fakes can do."""
        is_new = "_to_copy" in func.name()
        source = args[0] if is_new else args[1]
        target = options.get("device", source.device) if is_new else args[0].device
        is_asynchronous = bool(options.get("non_blocking", not is_new and args[2:] == (True,)))
        if source.device.type == target.type:
            return None
        if target.type == "cuda":
            if not (is_asynchronous and self._gpu.is_pinned(source)):
                self._fault("a copy from memory that is not pinned, or waited for")
            return None
        if is_new or not (is_asynchronous and self._gpu.is_pinned(args[0])):
            self._fault("a copy to the host that is waited for")
            return None
        with unset_fake_temporarily():
            self._gpu.bring(args[0])
        return args[0]

    def _fault(self, what: str) -> None:
        if self._gpu.is_in_step:
            self._gpu.fault(what)

    @staticmethod
    def _on_host(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


def _is_cuda(leaf: object) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def _is_host(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _is_composed(func: Any) -> bool:
    has_kernel: bool = func.namespace != "prim" and (
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
    return has_kernel


def on_fake_cuda() -> AbstractContextManager[FakeCuda]:
    """The usual one."""
    return FakeCuda()

"""The device itself behind what tests ask of a GPU that is not there.

Steps compute. Waits are those that torch's own check of synchronizing calls sees, and memory is
what was asked of torch's allocator, less what this process had before.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.fake_cuda import PRODUCTS

_CAPTURES = "/torch/cuda/graphs.py"
"""A capture waits for the device, once."""


@dataclass(eq=False)
class RealCuda:
    """`with RealCuda() as gpu`: has of `FakeCuda` what a device can show."""

    faults: list[str] = field(default_factory=list)
    num_replays: int = 0
    kernels: set[str] = field(default_factory=set)
    products: set[str] = field(default_factory=set)
    is_launching: bool = False
    _before_bytes: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> RealCuda:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda.CUDAGraph, "replay", self._counted(torch.cuda.CUDAGraph.replay))
        self._stack.enter_context(_Watch(self))
        for dtype in (torch.float32, torch.bfloat16):  # the library's workspaces are made once
            ones = torch.ones(16, 16, dtype=dtype, device="cuda")
            torch.mm(ones, ones)
            torch.addmm(ones[0], ones, ones)
        gc.collect()
        self._before_bytes = _requested("current")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def live_bytes(self) -> int:
        """The bytes of the tensors that are alive."""
        return _requested("current") - self._before_bytes

    @property
    def peak_bytes(self) -> int:
        """The most of them since the last launch began."""
        return _requested("peak") - self._before_bytes

    @contextmanager
    def launch(self) -> Iterator[None]:
        """While a step is launched nothing may wait. `peak_bytes` begins again."""
        torch.cuda.reset_peak_memory_stats()
        self.is_launching = True
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
                self.is_launching = False
        self.faults += [
            f"{each.filename}:{each.lineno}: {each.message}"
            for each in caught
            if "called a synchronizing" in str(each.message)
            and not each.filename.endswith(_CAPTURES)
        ]

    def result(self) -> AbstractContextManager[None]:
        """While a step's result is fetched, it is waited for."""
        return nullcontext()

    @property
    def num_read(self) -> int:
        """Not counted here."""
        return 0

    def _counted(self, replay: Any) -> Any:
        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self.num_replays += 1
            replay(graph)

        return counted


class _Watch(TorchDispatchMode):
    """Notes operations by name."""

    def __init__(self, gpu: RealCuda) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        if func.namespace == "triptych":
            self._gpu.kernels.add(name.removeprefix("triptych::"))
        if name in PRODUCTS and self._gpu.is_launching:
            self._gpu.products.add(name)
        return func(*args, **kwargs or {})


def _requested(which: str) -> int:
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))

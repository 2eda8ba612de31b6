"""The processor's time to launch each kernel of a decoder's layer, without a GPU.

Compiles the kernels for an H100 and launches them through a driver that does nothing, on tensors of
the host: what remains is our code, torch's dispatcher and Triton's launcher. A real driver takes
some 2.5 microseconds more. Counts the processor's time of the thread; the least of several turns
counts. "As an operator" is a launch the way a model calls it, through torch's dispatcher.

    python samples/benchmarks/launch_time.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from triptych.core.runtime.kernels.triton import add_rms_norm, gated, rope_write
from triptych.core.runtime.kernels.triton.paged_decode import launch_paged_decode, paged_decode
from triptych.core.runtime.kernels.triton.paged_prefill import launch_paged_prefill, paged_prefill

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEATURES = 32, 8, 128, 4096, 14336
PAGE_SIZE, NUM_PAGES, ROWS = 32, 64, 8
CALLS = 300


def _launch_nothing(*args: object) -> None:
    """Launch nothing."""


class IdleDriver:
    """A driver of Triton for an H100 that is not there: it loads and launches nothing."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (1, 1, 0, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
        )
        self._target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        """Return what launches a compiled kernel."""
        return _launch_nothing


def operations() -> Mapping[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """Launcher, operator and arguments of each kernel in a layer of Llama 3 8B's shape."""

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    x, weight, gates = new(ROWS, HIDDEN), new(HIDDEN), new(ROWS, 2 * FEATURES)
    qk, v = new(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM).split((HEADS + KV_HEADS, KV_HEADS), dim=1)
    pages = (*[new(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2)], None, None)
    table = torch.zeros(ROWS, 16, dtype=torch.int64)
    numbers = torch.ones(ROWS, dtype=torch.int64)
    q, out = new(ROWS, HEADS, HEAD_DIM), new(ROWS, HEADS, HEAD_DIM)
    rows = (*pages, table, numbers)
    rotation = (new(ROWS, 1, HEAD_DIM), new(ROWS, 1, HEAD_DIM), False)
    norm, rope = add_rms_norm, rope_write
    return {
        "add_rms_norm": (norm.launch_add_rms_norm, norm.add_rms_norm, (x, x, weight, 1e-5)),
        "rope_write": (
            rope.launch,
            rope.rope_write,
            (qk, v, None, 0.0, *rotation, *pages, numbers),
        ),
        "gated": (gated.launch, gated.gated, (gates, False)),
        "paged_decode": (
            launch_paged_decode,
            paged_decode,
            (q, *rows, out, None, 0.1, None, None, 1.0, False),
        ),
        "paged_prefill": (
            launch_paged_prefill,
            paged_prefill,
            (q, *rows, numbers, 0, out, None, None, 0.1, None, None, 1.0),
        ),
    }


def microseconds(call: Callable[..., Any], args: tuple[Any, ...], num_turns: int) -> float:
    """The least microseconds of one call, over `num_turns` turns of `CALLS` calls."""
    call(*args)
    turns = []
    for _ in range(num_turns):
        started_s = time.thread_time()
        for _ in range(CALLS):
            call(*args)
        turns.append((time.thread_time() - started_s) / CALLS * 1e6)
    return min(turns)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    triton.runtime.driver.set_active(IdleDriver())
    library = torch.library.Library("triptych", "IMPL")
    print("| kernel | launch | as an operator |\n|---|---|---|")
    with torch.inference_mode():
        for name, (launch, operator, args) in operations().items():
            library.impl(name, launch, "CPU")
            alone_us = microseconds(launch, args, options.turns)
            whole_us = microseconds(operator, args, options.turns)
            print(f"| {name} | {alone_us:.1f} | {whole_us:.1f} |", flush=True)


if __name__ == "__main__":
    main()

"""Compiles what the first light launches, on a machine without a GPU, into Triton's cache.

    TRITON_CACHE_DIR=/tmp/first-light-triton python samples/gpu/compile_ahead.py cuda:90

The folder is for the same path on the machine with the GPU, the same release of Triton and of
Python: it keeps absolute paths. Without it the stages compile at their first launches.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kernel_times
import torch
from place import Place

from triptych.core.runtime.kernels.triton.compile import CompileTarget, compile_all

NUM_PROCESSORS = 132
"""Of an H100 and an H200; the sizes of some grids follow from it."""


class AbsentGpu(Place):
    """A GPU's sizes, on tensors without memory."""

    __slots__ = ()

    @property
    def is_gpu(self) -> bool:
        """Whether sizes are those of a GPU."""
        return True


def main() -> None:
    """Compile the variants of all kernels, then what the timed cases launch besides."""
    target = CompileTarget.parse(sys.argv[1])
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    compiled = compile_all([target], folder)
    failed = [each for each in compiled if each.error]
    print(f"{len(compiled)} variants, {len(failed)} failed", flush=True)
    sources = launched(AbsentGpu(torch.device("meta"), False, folder, math.inf), target)
    num_failed = sum(not _compiles(*source, target) for source in sources)
    print(f"{len(sources)} launches, {num_failed} failed", flush=True)


def launched(place: Place, target: CompileTarget) -> list[tuple[Any, dict[str, Any]]]:
    """Sources and options of the kernels that the cases launch, each once."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    with _recording(target, found):
        for family in kernel_times.FAMILIES:
            for case in kernel_times._cases(family, place):
                for call in (case.ours, *case.peers.values()):
                    try:
                        call()
                    except Exception as error:  # a peer may need a real device
                        print(f"{case.name}: {str(error)[:100]}", flush=True)
    return list(found.values())


@contextmanager
def _recording(target: CompileTarget, found: dict[str, Any]) -> Iterator[None]:
    """Note launches in place of running them."""
    from triton.runtime.jit import JITFunction

    from triptych.core.runtime.kernels.triton import fp8_linear, grouped_packed, paged_decode

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        source, options = _source(kernel, args, kwargs, target)
        found.setdefault(f"{source.hash()} {sorted(options.items(), key=str)}", (source, options))

    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", note),
        (paged_decode, "_num_processors", lambda device: NUM_PROCESSORS),
        (fp8_linear, "has_float8_units", lambda device: target.multiplies_float8),
        (grouped_packed, "has_float8_units", lambda device: target.multiplies_float8),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _source(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: CompileTarget
) -> tuple[Any, dict[str, Any]]:
    """What a launch compiles, as Triton's own launch makes it."""
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target.gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = {**kwargs, "debug": False, "instrumentation_mode": ""}
    bound, specialization, options = bind(*args, **kwargs)
    packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
    options, signature, constants, attributes = packed
    return ASTSource(kernel, signature, constants, attributes), dict(options.__dict__)


def _compiles(source: Any, options: dict[str, Any], target: CompileTarget) -> bool:
    import triton

    try:
        triton.compile(source, target=target.gpu, options=options)
    except Exception as error:  # a compiler may raise anything
        print(f"{source.name}: {str(error)[:200]}", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()

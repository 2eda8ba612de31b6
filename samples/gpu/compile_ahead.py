"""Compiles what the first light launches, on a machine without a GPU, into Triton's cache.

    python samples/gpu/compile_ahead.py cuda:90

The folder, which it names at the end (`TRITON_CACHE_DIR`, if that is set), is for the same path on
the machine with the GPU, the same release of Triton and of Python: it keeps absolute paths. Without
it the stages compile at their first launches.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import kernel_times
import torch
from first_light import set_environment
from place import Place

from triptych.core.runtime.kernels import triton as kernels
from triptych.core.runtime.kernels.triton.compile import CompileTarget, compile_all, kernel_modules

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=CompileTarget.parse, help="cuda:90, say")
    parser.add_argument("--count", action="store_true", help="count launches, compile nothing")
    args = parser.parse_args()
    set_environment()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    if not args.count:
        compiled = compile_all([args.target], folder)
        print(f"{len(compiled)} variants, {sum(bool(each.error) for each in compiled)} failed")
    place = AbsentGpu(torch.device("meta"), False, folder, math.inf)
    sources, failed = launched(place, args.target)
    if not args.count:
        failed += [each[0].name for each in sources if not _compiles(each, args.target)]
    print(f"{len(sources)} launches, {len(failed)} failed", *failed, str(folder), sep="\n")
    sys.exit(1 if failed else 0)


def launched(
    place: Place, target: CompileTarget
) -> tuple[list[tuple[Any, dict[str, Any]]], list[str]]:
    """Sources and options of the kernels that the cases launch; failed cases, missing kernels."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    failed = []
    with _recording(target, found):
        for family in kernel_times.FAMILIES:
            for case in kernel_times._cases(family, place):
                try:
                    case.ours()
                except Exception as error:  # one case that fails must not end the others
                    failed.append(f"{case.name}: {str(error)[:200]}")
                for peer in case.peers.values():
                    with suppress(Exception):  # a library may need a real device
                        peer()
    names = {_name(source.fn) for source, _ in found.values()}
    failed += sorted(f"{name}: no case launches it" for name in _all_kernels() - names)
    return list(found.values()), failed


def _all_kernels() -> set[str]:
    """The names of all kernels that are compiled ahead for users."""
    modules = (import_module(f"{kernels.__name__}.{name}") for name in kernel_modules())
    return {
        _name(each.kernel)
        for module in modules
        if hasattr(module, "variants")
        for each in module.variants()
    }


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


@contextmanager
def _recording(target: CompileTarget, found: dict[str, Any]) -> Iterator[None]:
    """Note launches in place of running them."""
    from triton.runtime.jit import JITFunction

    from triptych.core.runtime.kernels.triton import decode_splits, fp8_linear, grouped_packed

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        source, options = _source(kernel, args, kwargs, target)
        found.setdefault(f"{source.hash()} {sorted(options.items(), key=str)}", (source, options))

    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", note),
        (decode_splits, "num_processors", lambda device: NUM_PROCESSORS),
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


def _compiles(launch: tuple[Any, dict[str, Any]], target: CompileTarget) -> bool:
    import triton

    source, options = launch
    try:
        triton.compile(source, target=target.gpu, options=options)
    except Exception as error:  # a compiler may raise anything
        print(f"{source.name}: {str(error)[:200]}")
        return False
    return True


if __name__ == "__main__":
    main()

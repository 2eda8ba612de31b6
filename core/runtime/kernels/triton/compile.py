"""Compiles every kernel of this folder ahead of time, for devices that need not be present.

python -m triptych.core.runtime.kernels.triton.compile --check

Owns the walk over the folder's `variants()` and `odd_variants()`, Triton's compiler call for an
explicit target, and the processes it runs in. Knows nothing of the kernels' computations, or of
bundles.

Results are stored in Triton's own cache. A launch finds one there if it has the same types,
constants, alignment, warps and stages, and the same version of Triton.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from triptych.core.errors import ConfigError
from triptych.core.process.threads import num_usable_cores
from triptych.core.runtime.kernels.triton.resources import (
    Resources,
    load_record,
    read_resources,
    regressions,
    save_record,
)
from triptych.core.runtime.kernels.triton.units import matrix_units, multiplies_float8
from triptych.core.runtime.kernels.triton.variant import Variant

_PACKAGE = "triptych.core.runtime.kernels.triton"
_KINDS = ("variants", "odd_variants")
_INTEGERS = {"i32", "i64", "u64"}


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A device by its instruction set: `cuda:90`, `hip:gfx942`."""

    backend: str
    arch: str

    @classmethod
    def parse(cls, text: str) -> CompileTarget:
        """Read `cuda:90`, `cuda:sm_90` or `hip:gfx942`. Raises `ConfigError`."""
        backend, _, arch = text.partition(":")
        arch = arch.removeprefix("sm_") if backend == "cuda" else arch
        is_known = arch.isdecimal() if backend == "cuda" else arch.startswith("gfx")
        if backend not in {"cuda", "hip"} or not is_known:
            raise ConfigError(f"{text!r} is not a target: use one like cuda:sm_90 or hip:gfx942.")
        return cls(backend, arch)

    @property
    def warp_size(self) -> int:
        """Threads of a warp: 64 on AMD's CDNA, 32 elsewhere."""
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def multiplies_float8(self) -> bool:
        """Whether the target has matrix units for e4m3."""
        return multiplies_float8(self.backend, self.arch)

    def takes(self, variant: Variant) -> bool:
        """Whether a launch on the target may be this variant."""
        if variant.matrix_units not in {None, matrix_units(self.backend, self.arch)}:
            return False
        return self.multiplies_float8 or not variant.multiplies_float8

    @property
    def gpu(self) -> Any:
        """The target as Triton's own type."""
        from triton.backends.compiler import GPUTarget

        arch = int(self.arch) if self.backend == "cuda" else self.arch
        return GPUTarget(self.backend, arch, self.warp_size)

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"


_SHARED_KIB = {"cuda:80": 163, "cuda:89": 99, "cuda:90": 227, "cuda:100": 227, "hip:gfx942": 64}
"""Shared memory available to a program; a launch that needs more fails."""
TARGETS = tuple(map(CompileTarget.parse, _SHARED_KIB))
"""The targets that every kernel must compile for, and whose resources are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledVariant:
    """The result of one variant on one target. `error` says why it did not compile."""

    module: str
    variant: str
    target: CompileTarget
    elapsed_s: float = 0.0
    is_hit: bool = False
    error: str | None = None
    resources: Resources | None = None

    @property
    def name(self) -> str:
        """The kernel's name, without the target."""
        return f"{self.module}.{self.variant}"

    @property
    def place(self) -> str:
        """The name in the record."""
        return f"{self.name} on {self.target}"


def kernel_modules() -> list[str]:
    """The modules of this folder, by name; some may have no kernels."""
    return [each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)])]


def compile_all(
    targets: Iterable[CompileTarget],
    cache_folder: Path | None = None,
    on_progress: Callable[[CompiledVariant], None] = lambda compiled: None,
    modules: Sequence[str] | None = None,
    kinds: Sequence[str] = ("variants",),
) -> list[CompiledVariant]:
    """Compile the variants of `modules`, or of all, for each target, on all usable cores.

    `kinds` are the functions that list them: `variants` the common ones, `odd_variants` others.

    The processes import the kernels for a compiler even where this one interprets them. A kernel
    that does not compile does not raise: see `CompiledVariant.error`. `cache_folder` is Triton's
    own unless given. `on_progress` is called here with each result as it comes.
    """
    names = kernel_modules() if modules is None else modules
    with ProcessPoolExecutor(
        num_usable_cores(),
        mp_context=get_context("spawn"),
        initializer=_prepare_process,
        initargs=(cache_folder,),
    ) as pool:
        jobs = {
            pool.submit(_compile_module, name, target, kinds): (name, target)
            for name in names
            for target in targets
        }
        results = []
        for job in as_completed(jobs):
            for compiled in _results_of(job, *jobs[job]):
                results.append(compiled)
                on_progress(compiled)
    return sorted(results, key=lambda each: (each.name, str(each.target)))


def _results_of(
    job: Future[list[CompiledVariant]], module: str, target: CompileTarget
) -> list[CompiledVariant]:
    try:
        return job.result()
    except BrokenProcessPool:  # by this job, or by another one
        error = "a compiler process ended"
        return [CompiledVariant(module=module, variant="*", target=target, error=error)]


def _prepare_process(cache_folder: Path | None) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    if cache_folder is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache_folder)


def _compile_module(
    module: str, target: CompileTarget, kinds: Sequence[str]
) -> list[CompiledVariant]:
    found = import_module(f"{_PACKAGE}.{module}")
    listed: list[Callable[[], tuple[Variant, ...]]]
    listed = [getattr(found, kind) for kind in kinds if hasattr(found, kind)]
    return [
        _compile(module, variant, target)
        for variants in listed
        for variant in variants()
        if target.takes(variant)
    ]


def _compile(module: str, variant: Variant, target: CompileTarget) -> CompiledVariant:
    import triton

    # Triton reports a cache hit to a listener only, and a miss not at all.
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    start_s, error, resources = time.perf_counter(), None, None
    try:
        kernel = _call_compiler(variant, target)
        shared_bytes, most = kernel.metadata.shared, _SHARED_KIB.get(str(target))
        if most is not None and shared_bytes > most * 1024:
            error = f"takes {shared_bytes} bytes of shared memory, {target} has {most} KiB"
        resources = read_resources(kernel.asm, shared_bytes)
    except Exception as raised:  # a compiler may raise anything
        error = f"{type(raised).__name__}: {raised}"
    return CompiledVariant(
        module=module,
        variant=variant.name,
        target=target,
        elapsed_s=time.perf_counter() - start_s,
        is_hit=any(hits),
        error=error,
        resources=resources,
    )


def _call_compiler(variant: Variant, target: CompileTarget) -> Any:
    import triton

    source, options = describe(variant, target)
    return triton.compile(source, target=target.gpu, options=options)


def describe(variant: Variant, target: CompileTarget) -> tuple[Any, dict[str, Any]]:
    """Source and options of a variant, exactly as a launch has them."""
    from triton.compiler.compiler import ASTSource, make_backend

    kernel, types = variant.kernel, variant.signature
    assert kernel.arg_names == list(types), f"the arguments are {kernel.arg_names}"
    values = {name: variant.constants.get(name) for name in types}
    specialization = [
        ("constexpr", values[param.name])
        if types[param.name] == "constexpr"
        else (types[param.name], _marks(variant, param))
        for param in kernel.params
    ]
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    backend = make_backend(target.gpu)
    packed = kernel._pack_args(backend, options, values, specialization, {})
    return ASTSource(kernel, *packed[1:]), options


def _marks(variant: Variant, param: Any) -> str | None:
    """A launch's marks: "D" for a multiple of 16 and, for AMD only, "S" for less than 2 GiB."""
    kind = variant.signature[param.name]
    is_pointer = kind.startswith("*")
    if param.do_not_specialize or not (is_pointer or kind in _INTEGERS):
        return None
    return "D" * (param.name in variant.divisible) + "S" * is_pointer


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile for all targets and compare with the record, or write it; 0 if all succeeded."""
    parser = argparse.ArgumentParser(prog=f"python -m {_PACKAGE}.compile")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail where a kernel takes more")
    mode.add_argument("--update", action="store_true", help="record what kernels take now")
    parser.add_argument("--cache-folder", type=Path, help="Triton's own unless given")
    parser.add_argument("modules", nargs="*", help="of this folder; all unless given")
    options = parser.parse_args(arguments)
    start_s = time.perf_counter()
    names = options.modules or None
    results = compile_all(TARGETS, options.cache_folder, _show, names, _KINDS)
    failed = [f"{each.place}: {each.error}" for each in results if each.error]
    now = {each.place: each.resources for each in results if each.resources is not None}
    record = load_record()
    others = {name: record[name] for name in record if names and name.split(".")[0] not in names}
    if options.update:
        save_record(others | now)
    else:
        failed += regressions(record, others | now)
    print(f"{len(results)} compiled in {time.perf_counter() - start_s:.0f} s")
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return bool(failed)


def _show(compiled: CompiledVariant) -> None:
    outcome = "FAILED" if compiled.error else "hit" if compiled.is_hit else "ok"
    takes = "" if compiled.resources is None else f"  {compiled.resources}"
    print(f"{compiled.elapsed_s:6.1f} s  {outcome:6}  {compiled.target}  {compiled.name}{takes}")


if __name__ == "__main__":
    sys.exit(main())

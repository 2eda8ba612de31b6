"""Compiles the C sources of this folder on first use, and keeps the result.

Owns the compiler call, the instruction levels it can compile for, and the folder of built
libraries. Knows nothing of the computations.

A library is named by two digests: of everything that decides its content (the sources, the flags,
and all that the compiler reports of itself and of its target), and of its own bytes. A damaged file
is therefore detected and built again, and another level, compiler or version gets its own file.

A library may come from another machine instead (`core.bundle`). Its recipe, the same digest without
the compiler's report, shows whether it was built from these sources; the system reports what this
processor can run, since there may be no compiler here.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from triptych.core.bundle.manifest import BundledKernels
from triptych.core.bundle.store import Bundle
from triptych.core.process.lookups import record_miss
from triptych.core.process.threads import num_usable_cores

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-mtune=native", "-pthread", "-fPIC", "-shared", "-std=gnu11", "-Wno-psabi")
_LONGEST = ("quantized.c", "recurrent.c", "low_rank.c", "attention.c", "mixture.c")
"""The sources that take most of the time are compiled first."""
_COMPILERS = ("cc", "gcc", "clang")
_CPUINFO = Path("/proc/cpuinfo")
_PREDEFINED = ("-dM", "-E", "-x", "c", os.devnull)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class _Level:
    """The flags that compile for an instruction level, and the macros of its processors."""

    flags: tuple[str, ...] = ()
    macros: frozenset[str] = frozenset()


_AVX2 = _Level(("-march=x86-64-v3",), frozenset({"__AVX2__", "__FMA__", "__F16C__", "__BMI2__"}))
_AVX512 = _Level(
    ("-march=x86-64-v4",),
    _AVX2.macros | {f"__AVX512{part}__" for part in ("F", "BW", "CD", "DQ", "VL")},
)
_AVX512_BF16 = _Level(
    (*_AVX512.flags, "-mavx512bf16", "-mavx512vnni"),
    _AVX512.macros | {"__AVX512BF16__", "__AVX512VNNI__"},
)
_AMX = _Level(
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    _AVX512_BF16.macros | {"__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__"},
)
LEVELS = MappingProxyType(
    {
        "amx": _AMX,
        "avx512_bf16": _AVX512_BF16,
        "avx512": _AVX512,
        "avx2": _AVX2,
        "portable": _Level(),
    }
)
"""Instruction levels of the kernels, highest first. Any processor runs `portable`."""


class BuildError(Exception):
    """There is no compiler, it failed, or the folder cannot be trusted or written."""


def supported_levels() -> tuple[str, ...]:
    """The levels that this processor and the compiler have, highest first; none without a compiler.

    The system may still refuse its tile unit, which `NativeKernels.open` checks.
    """
    try:
        compiler = _compiler()
    except BuildError:
        return ()
    try:
        macros = _macros(compiler, "-march=native")
    except BuildError:
        macros = frozenset()  # an Arm compiler may not know the flag, and has one level
    return tuple(name for name, level in LEVELS.items() if level.macros <= macros)


def processor_levels() -> tuple[str, ...]:
    """The levels that this processor has, as the system reports them, without a compiler."""
    found = re.search(r"^flags\s*: (.*)$", _read_cpuinfo(), re.MULTILINE)
    features = {_bare(flag) for flag in found[1].split()} if found else set()
    needs = {name: set(map(_bare, level.macros)) for name, level in LEVELS.items()}
    return tuple(name for name, needed in needs.items() if needed <= features)


def _bare(name: str) -> str:
    """A feature in one spelling for compilers (`__AVX512BF16__`) and Linux (`avx512_bf16`)."""
    return name.replace("_", "").lower()


def _read_cpuinfo() -> str:
    try:
        return _CPUINFO.read_text(encoding="utf-8")
    except OSError:  # not Linux
        return ""


def recipe(level: str) -> str:
    """A digest of everything that a library of `level` is made from, except the compiler."""
    flags = " ".join((*_FLAGS, *LEVELS[level].flags)).encode()
    return _digest(flags, *(path.read_bytes() for path in _files("*.[ch]")))


def build(folder: Path, level: str = "portable", *definitions: str) -> Path:
    """Build the library into `folder` unless it is there, and return its path: 6 s on two cores.

    `definitions` are macros of the sources, for tests. The folder is created for this user only.
    Safe to call from several processes at once. Raises `BuildError`.
    """
    compiler = _compiler()
    flags = (*_FLAGS, *LEVELS[level].flags, *(f"-D{name}" for name in definitions))
    try:
        _make_private(folder)
        target = _run(compiler, *flags, *_PREDEFINED)
        sources = (path.read_bytes() for path in _files("*.[ch]"))
        key = _digest(target, " ".join(flags).encode(), *sources)
        for path in folder.glob(f"{key}-*.so"):
            if path.name == _name(key, path.read_bytes()):
                return path
            path.unlink(missing_ok=True)
        record_miss("not built before")
        return _compile((compiler, *flags), folder, key)
    except OSError as error:
        raise BuildError(f"the kernel folder is unusable: {error.strerror}") from error


def bundle_library(path: Path, level: str, folder: Path) -> BundledKernels:
    """Copy the library at `path` into `folder` of a new bundle; returns its bundle entry."""
    name = f"kernels-{level}.so"
    shutil.copyfile(path, folder / name)
    return BundledKernels(
        architecture=platform.machine(),
        processor=processor_levels(),
        level=level,
        recipe=recipe(level),
        file=name,
    )


def bundled_library(bundle: Bundle, isa: str) -> tuple[Path, str]:
    """The library that a bundle has for this machine, and its level; `isa` is a level, or auto.

    Raises `BuildError` where it is for another kind of machine or built from other sources,
    `BundleError` where it is damaged.
    """
    promised = bundle.manifest.kernels
    assert promised is not None
    if (promised.architecture, promised.processor) != (platform.machine(), processor_levels()):
        raise BuildError("its kernels are for another kind of processor")
    if isa not in ("auto", promised.level):
        raise BuildError(f"its kernels are for {promised.level}, not {isa}")
    if promised.level not in LEVELS or promised.recipe != recipe(promised.level):
        raise BuildError("its kernels were built from other sources")
    return bundle.file(promised.file), promised.level


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None or os.name != "posix":
        raise BuildError("no C compiler was found")
    return compiler


def _macros(compiler: str, *flags: str) -> frozenset[str]:
    """The names of all macros that the compiler predefines: one for each feature."""
    lines = _run(compiler, *flags, *_PREDEFINED).decode().splitlines()
    return frozenset(line.split()[1] for line in lines)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise BuildError("the kernel folder belongs to another user")
    folder.chmod(0o700)


def _compile(command: tuple[str, ...], folder: Path, key: str) -> Path:
    """Compile the sources, as many at a time as there are cores, and link them."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        ThreadPoolExecutor(num_usable_cores()) as threads,
    ):

        def compile_one(source: Path) -> str:
            compiled = str(Path(scratch, source.stem + ".o"))
            _run(*command, "-c", "-o", compiled, str(source))
            return compiled

        sources = sorted(_files("*.c"), key=lambda path: path.name not in _LONGEST)
        built = Path(scratch, "built.so")
        _run(*command, "-o", str(built), *threads.map(compile_one, sources), "-lm")
        path = folder / _name(key, built.read_bytes())
        return built.replace(path)


def _run(*command: str) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_TIMEOUT_S)  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise BuildError(f"the C compiler failed: {error.stderr.decode()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError("the C compiler took too long") from error
    return done.stdout


def _files(pattern: str) -> list[Path]:
    return sorted(_SOURCES.glob(pattern))


def _name(key: str, content: bytes) -> str:
    return f"{key}-{_digest(content)}.so"


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]

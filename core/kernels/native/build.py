"""Compiles the C sources beside this file on first use, and keeps the result.

Owns the compiler call and the folder of built libraries. Knows nothing of what they compute.

A library is named by two digests: of everything that decides its content (the sources, the flags
and all that the compiler says of itself and of this processor), and of its own bytes. A damaged
file is therefore found out and built again, and a new processor, compiler or version gets its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-pthread",
    "-fPIC",
    "-shared",
    "-std=gnu11",
    "-Wno-psabi",
)
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 120.0


class BuildError(Exception):
    """There is no compiler, it failed, or the folder cannot be trusted or written."""


def build(folder: Path) -> Path:
    """Path of the library, built into `folder` unless it is there already; takes 1 to 3 s.

    The folder is made, and kept, for this user alone. Safe to call from several processes at
    once. Raises `BuildError`.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None or os.name != "posix":
        raise BuildError("no C compiler was found")
    try:
        _make_private(folder)
        key = _digest(_target(compiler), *(path.read_bytes() for path in _files("*.[ch]")))
        for path in folder.glob(f"{key}-*.so"):
            if path.name == _name(key, path.read_bytes()):
                return path
            path.unlink(missing_ok=True)
        return _compile(compiler, folder, key)
    except OSError as error:
        raise BuildError(f"the kernel folder is unusable: {error.strerror}") from error


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise BuildError("the kernel folder belongs to somebody else")
    folder.chmod(0o700)


def _target(compiler: str) -> bytes:
    """Every predefined macro: the compiler's version and each feature of this processor."""
    return _run(compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull)


def _compile(compiler: str, folder: Path, key: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch, "built.so")
        _run(compiler, *_FLAGS, "-o", str(built), *map(str, _files("*.c")), "-lm")
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

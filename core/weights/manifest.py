"""The manifest of a folder that Triptych wrote: the names, sizes and SHA-256 of its files.

Owns reading, writing and checking `manifest.json`. A folder with a manifest is sealed: it should
never change again, so opening it hashes every file:
SHA-256 is fast compared with reading from disk, and no cheaper check detects a flipped bit. A
server does so once per start, in the engine, in parallel with importing its libraries.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec

from triptych.core.errors import DamagedWeights, WeightsError
from triptych.core.process.regular_file import open_regular
from triptych.core.process.typed import decode_json
from triptych.core.weights.progress import Progress, SilentProgress

MANIFEST_NAME = "manifest.json"
MAGIC = "triptych-weights"
VERSION = 1
_CHUNK_BYTES = 1 << 22
_leaves_weights = ContextVar("leaves_weights", default=False)
_ahead: dict[Path, Future[Manifest]] = {}


class FileSeal(msgspec.Struct, frozen=True):
    """The size and SHA-256 of one file."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a sealed folder. `key` is its key in the cache, `source` its reference."""

    magic: str = MAGIC
    version: int = VERSION
    key: str
    source: str
    files: dict[str, FileSeal]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(seal.num_bytes for seal in self.files.values())

    @property
    def digest(self) -> str:
        """SHA-256 over all names and contents."""
        lines = (f"{name} {self.files[name].sha256}\n" for name in sorted(self.files))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_file(file: Path, progress: Progress | None = None) -> str:
    """Hex SHA-256 of a file's content."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(file) as stream:
        while num_bytes := stream.readinto(buffer):
            digest.update(buffer[:num_bytes])
            if progress is not None:
                progress.advance(num_bytes)
    return digest.hexdigest()


def seal(folder: Path, key: str, source: str) -> Manifest:
    """Hash and flush all files in and below `folder`, and write its manifest last."""
    files = {}
    for name, file in sorted(_files(folder).items()):
        files[name] = FileSeal(file.stat().st_size, sha256_file(file))
        flush(file)
    manifest = Manifest(key=key, source=source, files=files)
    target = folder / MANIFEST_NAME
    target.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    flush(target)
    flush(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest. Raises `WeightsError` if it is absent or not Triptych's."""
    try:
        manifest = decode_json((folder / MANIFEST_NAME).read_bytes(), Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{MANIFEST_NAME} is missing or damaged.") from error
    if manifest.magic != MAGIC or manifest.version != VERSION:
        raise WeightsError(f"{MANIFEST_NAME} has another format or version.")
    return manifest


def verify(folder: Path, progress: Progress | None = None) -> Manifest:
    """Check that `folder` matches its manifest byte for byte.

    Raises `WeightsError` naming the first file that is missing, truncated, changed or unexpected.
    Inside `skip_weight_files` only the sizes of safetensors files are checked.
    """
    try:
        return _verify(folder, progress or SilentProgress())
    except OSError as error:
        raise DamagedWeights(f"A sealed file cannot be read: {error.strerror}.") from error


@contextmanager
def skip_weight_files() -> Iterator[None]:
    """Make `verify` skip the content of weight files, which is verified when they are opened."""
    token = _leaves_weights.set(True)
    try:
        yield
    finally:
        _leaves_weights.reset(token)


def verify_in_background(folders: Iterable[Path]) -> None:
    """Start verifying the sealed `folders` on a thread; `verify_if_sealed` waits for it."""
    thread = ThreadPoolExecutor(1, "triptych-verify")
    for folder in dict.fromkeys(folders):
        if is_sealed(folder):
            _ahead[folder] = thread.submit(verify, folder)
    thread.shutdown(wait=False)


def _verify(folder: Path, progress: Progress) -> Manifest:
    manifest = read_manifest(folder)
    found = _files(folder).keys() - {MANIFEST_NAME}
    for name in sorted(found ^ manifest.files.keys()):
        raise DamagedWeights(f"{name} is {'unexpected' if name in found else 'missing'}.")
    for name, expected in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != expected.num_bytes:
            raise DamagedWeights(f"{name} has {size} bytes instead of {expected.num_bytes}.")
    progress.start("Verifying", manifest.num_bytes)
    for name, expected in manifest.files.items():
        if _leaves_weights.get() and name.endswith(".safetensors"):
            continue
        if sha256_file(folder / name, progress) != expected.sha256:
            raise DamagedWeights(f"{name} is damaged: its SHA-256 differs from the one recorded.")
    return manifest


def _files(folder: Path) -> dict[str, Path]:
    """Every file in and below `folder`, by relative path."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {file.relative_to(folder).as_posix(): file for file in files}


def verify_if_sealed(folder: Path) -> None:
    """Verify `folder` if it is sealed; other folders have no manifest to compare with.

    A result of `verify_in_background` is used once, because the files may change later.
    """
    proof = _ahead.pop(folder, None)
    if proof is not None:
        proof.result()
    elif is_sealed(folder):
        verify(folder)


def is_sealed(folder: Path) -> bool:
    """Whether the folder has Triptych's manifest, not another program's file of that name."""
    manifest = folder / MANIFEST_NAME
    return manifest.is_file() and MAGIC.encode() in manifest.read_bytes()


def flush(path: Path) -> None:
    """Force a file's or folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

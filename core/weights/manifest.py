"""The seal of a folder we made: which files it holds, how long they are and what they hash to.

Owns reading, writing and checking `manifest.json`. Opening a sealed folder hashes every file
again: SHA-256 runs at memory speed next to reading from disk, and nothing cheaper notices a
flipped bit. A server does so once in a start, in the engine, beside the import of its libraries.
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
    """Length and content of one file."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a sealed folder holds. `key` is its address, `source` the reference it came from."""

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
    """The folder's manifest. Raises `WeightsError` when it is absent or not one of ours."""
    try:
        manifest = decode_json((folder / MANIFEST_NAME).read_bytes(), Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{MANIFEST_NAME} is missing or damaged.") from error
    if manifest.magic != MAGIC or manifest.version != VERSION:
        raise WeightsError(f"{MANIFEST_NAME} is of another kind or version.")
    return manifest


def verify(folder: Path, progress: Progress | None = None) -> Manifest:
    """Prove that `folder` holds exactly what its manifest says, byte for byte.

    Raises `WeightsError` naming the first file that is missing, truncated, changed or unexpected.
    Inside `leaving_weights_unread` those of safetensors are believed if their lengths are right.
    """
    try:
        return _verify(folder, progress or SilentProgress())
    except OSError as error:
        raise DamagedWeights(f"A sealed file cannot be read: {error.strerror}.") from error


@contextmanager
def leaving_weights_unread() -> Iterator[None]:
    """Inside, `verify` leaves the large files to those who open them, and verify them then."""
    token = _leaves_weights.set(True)
    try:
        yield
    finally:
        _leaves_weights.reset(token)


def verify_ahead(folders: Iterable[Path]) -> None:
    """Begin to verify the sealed ones of `folders` on a thread: `verify_if_sealed` will wait."""
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
            raise DamagedWeights(f"{name} is damaged: its SHA-256 is not the one recorded.")
    return manifest


def _files(folder: Path) -> dict[str, Path]:
    """Every file in and below `folder`, by its place in it."""
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {file.relative_to(folder).as_posix(): file for file in files}


def verify_if_sealed(folder: Path) -> None:
    """Verify a folder of ours; others have nothing to compare with, or a manifest of their own.

    What `verify_ahead` found counts once: later there may be other bytes.
    """
    proof = _ahead.pop(folder, None)
    if proof is not None:
        proof.result()
    elif is_sealed(folder):
        verify(folder)


def is_sealed(folder: Path) -> bool:
    """Whether there is a manifest of ours, and not another program's file of that name."""
    manifest = folder / MANIFEST_NAME
    return manifest.is_file() and MAGIC.encode() in manifest.read_bytes()


def flush(path: Path) -> None:
    """Force a file's or folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What a bundle says of itself: `bundle.json`, and the proof that it is whole.

Owns the file's format, its own checksum, and the seals of the files beside it. A bundle is data: it
is read as typed JSON, and each file is used only after it was hashed. Knows nothing of who uses
them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from triptych.core.errors import BundleError
from triptych.core.process.regular_file import read_regular
from triptych.core.process.typed import convert, decode_json
from triptych.core.weights.manifest import FileSeal, flush, sha256_file

NAME = "bundle.json"
MAGIC = "triptych-bundle"
VERSION = 1
MODELS = "models"
"""Folder of the models in a bundle; each has a seal of its own (`core.weights.manifest`)."""
TRITON = "triton"
"""Folder of Triton's own caches in a bundle, one for each target."""
_MAX_BYTES = 32_000_000


class BundledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was resolved: the place named, the digest of its weights, where they are.

    `folder` is a place in the bundle, sealed by itself, whose seal has the SHA-256 `seal`; both are
    empty where the weights are the user's own folder, or part of the package. `stamp` changes with
    the local files of the reference; it is empty where it names none.
    """

    reference: str
    digest: str
    folder: str = ""
    seal: str = ""
    stamp: str = ""


class BundledKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The native kernels: `file`, compiled for `level`, and the kind of machine they are for.

    `processor` has the levels of its processor; `recipe` is a digest of what they were built from.
    """

    architecture: str
    processor: tuple[str, ...]
    level: str
    recipe: str
    file: str


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the models took: what the ledger planned by owner, and what the device gave."""

    planned: dict[str, int]
    taken_bytes: int


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a bundle promises.

    `versions` are those of the libraries that made it, `options` the ones its content depends on,
    `device` where it was made. `targets` has the compiled Triton kernels by target, `phases` how
    long each part of the making took.
    """

    magic: str = MAGIC
    version: int = VERSION
    made_at: str
    versions: dict[str, str]
    options: dict[str, str]
    device: str
    models: tuple[BundledModel, ...] = ()
    kernels: BundledKernels | None = None
    targets: dict[str, tuple[str, ...]] = {}
    memory: MemoryProfile | None = None
    phases: dict[str, float] = {}
    files: dict[str, FileSeal] = {}


class _Envelope(msgspec.Struct, frozen=True):
    """The content of `bundle.json`, and the SHA-256 of its bytes."""

    sha256: str
    content: msgspec.Raw


def seal_files(folder: Path) -> dict[str, FileSeal]:
    """The seals of all files in a new bundle, flushed to disk; those of models are their own."""
    seals = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_file() and name.parts[0] != MODELS:
            seals[name.as_posix()] = FileSeal(file.stat().st_size, sha256_file(file))
            flush(file)
    return seals


def write_manifest(folder: Path, manifest: BundleManifest) -> None:
    """Write `bundle.json` and force it to disk."""
    content = msgspec.json.encode(manifest)
    sha256 = hashlib.sha256(content).hexdigest()
    file = folder / NAME
    file.write_bytes(msgspec.json.encode(_Envelope(sha256, msgspec.Raw(content))))
    flush(file)
    flush(folder)


def read_bundle_manifest(folder: Path) -> BundleManifest:
    """What the bundle in `folder` promises. Raises `BundleError` unless it is whole and ours."""
    try:
        envelope = decode_json(read_regular(folder / NAME, _MAX_BYTES), _Envelope)
        fields = msgspec.json.decode(envelope.content)
    except OSError as error:
        raise BundleError(f"{NAME} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"{NAME} is damaged.") from error
    if hashlib.sha256(envelope.content).hexdigest() != envelope.sha256:
        raise BundleError(f"{NAME} is damaged: its SHA-256 is not the one it names.")
    if not isinstance(fields, dict) or (fields.get("magic"), fields.get("version")) != (
        MAGIC,
        VERSION,
    ):
        raise BundleError(f"{NAME} is of another kind or version.")
    try:
        return convert(fields, BundleManifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"{NAME} is of another kind or version.") from error

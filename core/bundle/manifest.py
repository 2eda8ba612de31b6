"""The manifest of a bundle, `bundle.json`, and its integrity check.

Owns the file's format, its own checksum, and the seals of the other files. A bundle is data: the
manifest is read as typed JSON, and each file is used only after it was hashed. Knows nothing of the
users of those files.
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
"""Folder of the models in a bundle; each has its own manifest (`core.weights.manifest`)."""
TRITON = "triton"
"""Folder of Triton's own caches in a bundle, one for each target."""
_MAX_BYTES = 32_000_000


class BundledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was resolved: its reference, the digest of its weights, and their location.

    `folder` is a folder in the bundle with its own manifest, whose SHA-256 is `seal`; both are
    empty if the weights are in the user's own folder or in the package. `stamp` changes with the
    local files of the reference; it is empty if the reference is not local.
    """

    reference: str
    digest: str
    folder: str = ""
    seal: str = ""
    stamp: str = ""


class BundledKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The native kernels: `file`, compiled for `level`, and the kind of machine they are for.

    `processor` has the levels of its processor; `recipe` is a digest of sources and build options.
    """

    architecture: str
    processor: tuple[str, ...]
    level: str
    recipe: str
    file: str


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the models: bytes planned in the ledger by owner, and bytes used on the device."""

    planned: dict[str, int]
    taken_bytes: int


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a bundle.

    `versions` are those of the libraries that built it, `options` those its content depends on,
    `device` the device it was built on. `targets` has the compiled Triton kernels by target,
    `phases` the build time of each part.
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
    """Flush and seal all files in a new bundle, except models, which have their own manifests."""
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
    """The manifest of the bundle in `folder`. Raises `BundleError` if damaged or not a bundle's."""
    try:
        envelope = decode_json(read_regular(folder / NAME, _MAX_BYTES), _Envelope)
        fields = msgspec.json.decode(envelope.content)
    except OSError as error:
        raise BundleError(f"{NAME} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"{NAME} is damaged.") from error
    if hashlib.sha256(envelope.content).hexdigest() != envelope.sha256:
        raise BundleError(f"{NAME} is damaged: its SHA-256 differs from the one recorded.")
    if not isinstance(fields, dict) or (fields.get("magic"), fields.get("version")) != (
        MAGIC,
        VERSION,
    ):
        raise BundleError(f"{NAME} is of another kind or version.")
    try:
        return convert(fields, BundleManifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"{NAME} is of another kind or version.") from error

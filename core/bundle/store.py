"""Bundles on disk: their location, validity and atomic creation.

Owns opening a bundle (checks of owner, manifest, versions and options) and writing one: into a
partial folder, renamed into place when complete. Knows nothing of the content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from msgspec import structs

from triptych.core.bundle.manifest import (
    MODELS,
    NAME,
    BundledModel,
    BundleManifest,
    read_bundle_manifest,
    seal_files,
    write_manifest,
)
from triptych.core.errors import BundleError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lookups import record_miss, timed_lookup
from triptych.core.process.versions import versions
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.manifest import MANIFEST_NAME, FileSeal, flush, sha256_file

AUTO, NONE = "auto", "none"
"""Values of `--bundle` that are not folders."""
_OPTIONS = ("revision", "dtype", "quantization_encoding", "model_override")
"""Options that the weights of a reference depend on."""
_PARTIAL, _OLD = ".partial", ".old"
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH

Fill = Callable[[Path], BundleManifest]
"""Fills an empty folder and returns its manifest, to which the seals are added."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle with a valid manifest."""

    folder: Path
    manifest: BundleManifest

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """Open a bundle. Raises `BundleError` if it is damaged or writable by other users."""
        _check_owner(folder.resolve())
        _check_owner(folder / NAME)
        return cls(folder, read_bundle_manifest(folder))

    def file(self, name: str) -> Path:
        """The path of a file, after its content was verified. Raises `BundleError`."""
        expected, path = self.manifest.files.get(name), self.folder / name
        if expected is None:
            raise BundleError(f"The bundle does not contain {name}.")
        self._check_path(name)
        try:
            found = FileSeal(path.stat().st_size, sha256_file(path))
        except OSError as error:
            raise BundleError(f"{name} of the bundle cannot be read: {error.strerror}.") from error
        if found != expected:
            raise BundleError(f"{name} of the bundle is damaged: its SHA-256 differs.")
        return path

    def model_folder(self, model: BundledModel) -> Path:
        """The folder of a model, after its manifest was verified. Raises `BundleError`."""
        name = Path(MODELS, Path(model.folder).name, MANIFEST_NAME)
        self._check_path(name.as_posix())
        seal = self.folder / name
        folder = seal.parent
        if not seal.is_file() or sha256_file(seal) != model.seal:
            raise BundleError(f"The seal of {model.reference} in the bundle is damaged.")
        return folder

    def _check_path(self, name: str) -> None:
        """Raise `BundleError` unless a file and all folders on its path pass `_check_owner`."""
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts:
            raise BundleError(f"{name} lies outside the bundle.")
        for end in range(1, len(parts) + 1):
            _check_owner(self.folder.joinpath(*parts[:end]))

    def model(self, reference: str) -> BundledModel | None:
        """The bundle's entry for the model of `reference`, if any."""
        models = self.manifest.models
        return next((model for model in models if model.reference == reference), None)

    def check(self, options: ModelOptions) -> None:
        """Raise `BundleError` if the bundle was built by another version or with other options."""
        made, here = self.manifest.versions.get("triptych", "unknown"), versions()["triptych"]
        if made != here:
            raise BundleError(f"it was built by triptych {made}, but this is {here}.")
        for name, value in content_options(options).items():
            if (other := self.manifest.options.get(name, "")) != value:
                flag = f"--{name.replace('_', '-')}"
                raise BundleError(f"it was built with {flag} {other!r}, but this is {value!r}.")


def find_bundle(options: ModelOptions, references: Sequence[str]) -> Bundle | None:
    """The bundle to start from, or `None`. Raises `BundleError` if `--bundle` names an invalid one.

    A bundle that does not match version or options is recorded as a miss, with its reason.
    """
    if options.bundle == NONE:
        return None
    folder = bundle_folder(options, references)
    if options.bundle == AUTO and not (folder / NAME).exists():
        return None
    with timed_lookup("bundle", folder.name) as search:
        search.is_promised = True
        try:
            bundle = Bundle.open(folder)
        except BundleError as error:
            if options.bundle != AUTO:
                raise
            record_miss(error.message)
            return None
        try:
            bundle.check(options)
        except BundleError as error:
            record_miss(error.message)
            return None
        return bundle


def bundle_folder(options: ModelOptions, references: Sequence[str]) -> Path:
    """The folder of the bundle: the one set by `--bundle`, or one in the cache folder."""
    if options.bundle not in (AUTO, NONE):
        return Path(options.bundle).expanduser()
    lines = [*references, *(f"{name}={text}" for name, text in content_options(options).items())]
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return WeightsCache.open(options.cache_dir).bundles / key[:16]


def content_options(options: ModelOptions) -> dict[str, str]:
    """The options that determine a bundle's content, as text."""
    values = {name: getattr(options, name) for name in _OPTIONS}
    return {
        name: " ".join(value) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


def write_bundle(folder: Path, fill: Fill) -> BundleManifest:
    """Build a bundle with `fill`, and replace the one in `folder`, if any.

    If interrupted, `folder` holds a complete bundle or none: the bundle is built in a partial
    folder and renamed. Raises what `fill` raises, and `BundleError` if `folder` is not a bundle.
    """
    if folder.exists() and not (folder / NAME).is_file():
        raise BundleError(f"{folder.name} exists and is not a bundle; name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}"
    partial, old = beside.with_suffix(_PARTIAL), beside.with_suffix(_OLD)
    with FileLock(beside.with_suffix(".lock")):
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir(mode=0o755)
        try:
            manifest = _seal(partial, fill(partial))
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            flush(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    return manifest


def _seal(folder: Path, manifest: BundleManifest) -> BundleManifest:
    for path in (folder, *folder.rglob("*")):
        is_in_model = MODELS in path.relative_to(folder).parts[:-1] and path.is_file()
        if (
            not is_in_model or path.name == MANIFEST_NAME
        ):  # other files may be shared with the cache
            _protect(path)
    sealed = structs.replace(manifest, files=seal_files(folder))
    write_manifest(folder, sealed)
    _protect(folder / NAME)
    return sealed


def _protect(path: Path) -> None:
    """Remove write access of other users, regardless of the umask; see `_check_owner`."""
    path.chmod(path.stat().st_mode & ~_WRITABLE)


def _check_owner(path: Path) -> None:
    """Raise `BundleError` unless only this user and root can write: bundles contain code."""
    try:
        status = path.lstat()
    except OSError as error:
        raise BundleError(f"There is no bundle at that path: {path.name} is missing.") from error
    if stat.S_ISLNK(status.st_mode):
        raise BundleError(f"{path.name} is a link; a bundle must contain the files themselves.")
    if os.name == "posix" and status.st_uid not in (0, os.geteuid()):
        raise BundleError(f"{path.name} belongs to another user; copy the bundle first.")
    if os.name == "posix" and status.st_mode & _WRITABLE:
        raise BundleError(
            f"Other users can write to {path.name}; run `chmod -R go-w` on the bundle."
        )

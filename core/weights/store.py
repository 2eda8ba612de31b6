"""Weights stored on this machine: converted ones and hub snapshots.

Owns finding, checking and removing them by name for `triptych models`. Not used when serving.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.hub import hub_cache_dir
from triptych.core.weights.layout import read_layout, weight_files
from triptych.core.weights.manifest import sha256_file, verify
from triptych.core.weights.packages import EMBEDDED
from triptych.core.weights.pipeline_index import is_pipeline, read_pipeline
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import EMBEDDED_NAME, EMBEDDED_REFERENCE

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MIN_KEY_CHARS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """One model on disk. `key`: the cache's address, or the hub's commit."""

    name: str
    kind: Literal["converted", "hub"]
    key: str
    folder: Path
    num_bytes: int
    is_whole: bool


def stored_models(options: ModelOptions) -> list[StoredModel]:
    """Every model in the caches that `options` point to, including damaged ones."""
    return [*_converted(WeightsCache.open(options.cache_dir)), *_snapshots(options)]


def find_model(stored: Sequence[StoredModel], name: str) -> StoredModel:
    """The model called `name`, or the only one whose key starts with it. Raises `ConfigError`."""
    name = EMBEDDED_NAME if name == EMBEDDED_REFERENCE else name
    found = [model for model in stored if model.name == name] or [
        model for model in stored if len(name) >= _MIN_KEY_CHARS and model.key.startswith(name)
    ]
    if len(found) != 1:
        count = "No" if not found else "More than one"
        raise ConfigError(
            f"{count} stored model is called {name!r}; `triptych models list` shows them."
        )
    return found[0]


def verify_stored(model: StoredModel, progress: Progress) -> None:
    """Hash every file again. Raises `WeightsError` naming the first that has changed.

    The hub's cache names large files by their SHA-256; for smaller files only the headers are
    checked.
    """
    if model.kind == "converted":
        verify(model.folder, progress)
        return
    folders = [model.folder]
    if is_pipeline(model.folder):  # parts with fetched weights
        parts = (model.folder / name for name in read_pipeline(model.folder).parts)
        folders = [part for part in parts if any(part.glob("*.safetensors"))]
    for folder in folders:
        read_layout(folder)
        for file in weight_files(folder):
            expected = file.resolve().name
            progress.start("Verifying", file.stat().st_size)
            if _SHA256.fullmatch(expected) and sha256_file(file, progress) != expected:
                raise WeightsError(f"{file.name} is damaged: its SHA-256 differs from the hub's.")


def remove(model: StoredModel, options: ModelOptions) -> None:
    """Delete a model's files, except those shared with other revisions."""
    if model.kind == "converted":
        shutil.rmtree(model.folder)
    else:
        scan_cache_dir(hub_cache_dir(options)).delete_revisions(model.key).execute()


def _converted(cache: WeightsCache) -> list[StoredModel]:
    models = []
    for folder, manifest in cache.entries():
        name = "?" if manifest is None else manifest.source
        models.append(
            StoredModel(
                name=EMBEDDED_NAME if name == EMBEDDED.reference else name,
                kind="converted",
                key=folder.name,
                folder=folder,
                num_bytes=sum(file.stat().st_size for file in folder.rglob("*")),
                is_whole=manifest is not None,
            )
        )
    return models


def _snapshots(options: ModelOptions) -> list[StoredModel]:
    try:
        repositories = scan_cache_dir(hub_cache_dir(options)).repos
    except CacheNotFound:
        return []
    return [
        StoredModel(
            name=repository.repo_id,
            kind="hub",
            key=revision.commit_hash,
            folder=revision.snapshot_path,
            num_bytes=revision.size_on_disk,
            is_whole=True,
        )
        for repository in sorted(repositories, key=lambda repository: repository.repo_id)
        for revision in repository.revisions
        if repository.repo_type == "model"
        and any(file.file_name.endswith(".safetensors") for file in revision.files)
    ]

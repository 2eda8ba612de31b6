"""Adding model weights to a bundle, except those that every start finds outside of it.

Owns copying, by hard links where possible. Knows nothing of the readers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from triptych.core.bundle.manifest import MODELS, BundledModel
from triptych.core.options.config import ModelOptions
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.hub import hub_cache_dir
from triptych.core.weights.links import link_or_copy
from triptych.core.weights.manifest import MANIFEST_NAME, is_sealed, seal, sha256_file
from triptych.core.weights.resolve import ResolvedModel, place_of, place_stamp


def add_model(bundle: Path, model: ResolvedModel, options: ModelOptions) -> BundledModel:
    """Add a model's weights to the folder of a new bundle; returns their manifest entry.

    Weights in the user's own folders and in the package are not copied.
    """
    source = Path(model.folder)
    place, stamp = place_of(model.reference), place_stamp(model.reference)
    if not _is_kept_by_us(source, options):
        return BundledModel(reference=place, digest=model.digest, stamp=stamp)
    folder = bundle / MODELS / model.digest[:16]
    if not folder.exists():
        copy_folder(source, folder)
        if not is_sealed(folder):
            seal(folder, model.digest, place)
    return BundledModel(
        reference=place,
        digest=model.digest,
        folder=folder.name,
        seal=sha256_file(folder / MANIFEST_NAME),
        stamp=stamp,
    )


def copy_folder(source: Path, folder: Path) -> None:
    """Copy all files of `source`; the manifest of a sealed folder is copied, never linked."""
    for file in sorted(source.rglob("*")):
        target = folder / file.relative_to(source)
        if not file.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.name != MANIFEST_NAME:
            link_or_copy(file.resolve(), target)
        elif is_sealed(source):
            shutil.copyfile(file, target)


def _is_kept_by_us(folder: Path, options: ModelOptions) -> bool:
    """Whether the folder was fetched or converted: it is in our cache or the hub library's."""
    from huggingface_hub.constants import HF_HUB_CACHE

    hub = hub_cache_dir(options) or Path(HF_HUB_CACHE)
    caches = (WeightsCache.open(options.cache_dir).models, hub)
    return any(folder.resolve().is_relative_to(cache.resolve()) for cache in caches)

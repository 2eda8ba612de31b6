"""Copying precompiled Triton kernels from a bundle into Triton's cache folder.

Owns that folder, and rewriting the paths in it: Triton stores absolute paths, and recompiles if one
of them does not exist. Imports no Triton.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from triptych.core.bundle.manifest import TRITON
from triptych.core.bundle.store import Bundle
from triptych.core.errors import BundleError
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.lookups import record_miss, timed_lookup
from triptych.core.process.versions import versions
from triptych.core.weights.cache import WeightsCache

_GROUP = "__grp__"
_FOLDER_VARIABLE = "TRITON_CACHE_DIR"


def target_folder(target: str) -> str:
    """The name of a target's folder, in a bundle and in the cache: `cuda-90`."""
    return target.replace(":", "-")


@cache
def use_triton_cache(cache_dir: str, target: str, bundle: str) -> None:
    """Set TRITON_CACHE_DIR to a folder in Triptych's cache, and copy a bundle's kernels there.

    `bundle` is a folder, or empty. If the user has set TRITON_CACHE_DIR, that folder is used.
    """
    folder = WeightsCache.open(cache_dir).triton / target_folder(target)
    folder = Path(os.environ.setdefault(_FOLDER_VARIABLE, str(folder)))
    if not bundle:
        return
    opened = Bundle.open(Path(bundle))
    if target not in opened.manifest.targets:
        return
    with timed_lookup("triton kernels", target) as search:
        search.is_promised = True
        made, here = opened.manifest.versions.get("triton"), versions()["triton"]
        if made != here:
            record_miss(f"they were compiled by triton {made}, but this is {here}")
            return
        try:
            restore(opened, target, folder)
        except (BundleError, OSError) as error:
            record_miss(str(error))


def restore(bundle: Bundle, target: str, folder: Path) -> None:
    """Copy the kernels of a bundle for `target` into `folder`, verifying each file.

    Raises `BundleError` for a damaged file; files copied before it are complete.
    """
    prefix = f"{TRITON}/{target_folder(target)}/"
    for name in bundle.manifest.files:
        if name.startswith(prefix):
            content = bundle.file(name).read_bytes()
            place = folder / name.removeprefix(prefix)
            if place.name.startswith(_GROUP):
                content = _relocate(content, place.parent)
            if not place.exists():
                _write(place, content)


def _relocate(group: bytes, folder: Path) -> bytes:
    """Rewrite a group file, which lists the paths of a kernel's files, for its new folder."""
    names = json.loads(group)["child_paths"]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


def _write(place: Path, content: bytes) -> None:
    """Write atomically: another process may be reading."""
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, [content], is_durable=False)

"""Kernels that Triton compiled ahead: out of a bundle into the folder where Triton looks.

Owns that folder, and the rewriting of the places in it: Triton keeps absolute paths, and compiles
again where one of them is not there. Imports no Triton.
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
from triptych.core.process.lookups import looking_for, missed
from triptych.core.process.versions import versions
from triptych.core.weights.cache import WeightsCache

_GROUP = "__grp__"
_FOLDER_VARIABLE = "TRITON_CACHE_DIR"


def target_folder(target: str) -> str:
    """The name of a target's folder, in a bundle and in the cache: `cuda-90`."""
    return target.replace(":", "-")


@cache
def use_triton_cache(cache_dir: str, target: str, bundle: str) -> None:
    """Have Triton keep its kernels in our cache folder, where those of a bundle are put first.

    `bundle` is a folder, or empty. A folder that the user named for Triton stays.
    """
    folder = WeightsCache.open(cache_dir).triton / target_folder(target)
    folder = Path(os.environ.setdefault(_FOLDER_VARIABLE, str(folder)))
    if not bundle:
        return
    opened = Bundle.open(Path(bundle))
    if target not in opened.manifest.targets:
        return
    with looking_for("triton kernels", target) as search:
        search.is_promised = True
        made, here = opened.manifest.versions.get("triton"), versions()["triton"]
        if made != here:
            missed(f"they were compiled by triton {made}, and this is {here}")
            return
        try:
            restore(opened, target, folder)
        except (BundleError, OSError) as error:
            missed(str(error))


def restore(bundle: Bundle, target: str, folder: Path) -> None:
    """Put the kernels of a bundle for `target` into `folder`, each file proven before.

    Raises `BundleError` for a damaged file; what was put there until then is whole.
    """
    prefix = f"{TRITON}/{target_folder(target)}/"
    for name in bundle.manifest.files:
        if name.startswith(prefix):
            content = bundle.file(name).read_bytes()
            place = folder / name.removeprefix(prefix)
            if place.name.startswith(_GROUP):
                content = _moved(content, place.parent)
            if not place.exists():
                _write(place, content)


def _moved(group: bytes, folder: Path) -> bytes:
    """A group's file, which names the files of a kernel, for its new folder."""
    names = json.loads(group)["child_paths"]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


def _write(place: Path, content: bytes) -> None:
    """At once whole: another process may be looking."""
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, [content], is_durable=False)

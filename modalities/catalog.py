"""The models that can be named without a repository, and the kind of any model in a folder.

Owns what `triptych models` says of them. Loads no modality's API or engine half.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from triptych.core.errors import WeightsError
from triptych.core.options.declaration import Role
from triptych.core.weights.packages import EMBEDDED
from triptych.core.weights.resolve import EMBEDDED_NAME, ResolvedModel
from triptych.modalities.registry import MODALITIES, role_of


class CatalogEntry(NamedTuple):
    """A named model: its kind, the size of its download (0: part of the package), its license."""

    name: str
    role: Role
    download_bytes: int
    license: str


def catalog() -> list[CatalogEntry]:
    """Return all named models, by kind, and the default one of each kind first."""
    entries = [CatalogEntry(EMBEDDED_NAME, "chat", EMBEDDED.wheel_bytes, "Apache-2.0")]
    for modality in reversed(MODALITIES):
        sources = modality.load_sources()
        for source in sorted(sources, key=lambda source: source.name != modality.default):
            size = source.download_bytes
            entries.append(CatalogEntry(source.name, modality.role, size, source.license))
    return entries


def role_in(folder: Path) -> Role | None:
    """Return the kind of the model in `folder`; `None` if its configuration cannot be read."""
    try:
        return role_of(ResolvedModel(name="", reference="", folder=str(folder), digest=""))
    except WeightsError:
        return None

"""The models that a running server may fetch on request.

Owns the options `--pull-from` and `--pull-folder` as a check of one reference. Fetches nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from triptych.core.errors import UnsupportedOption
from triptych.core.options.server import PULL_SOURCES, ServerOptions
from triptych.core.weights.resolve import EMBEDDED_NAME, EMBEDDED_REFERENCE, path_of, place_of

_NAMES, _PACKAGES, _HUB = PULL_SOURCES[1:]
_FILES = (".gguf", ".safetensors")


def check_may_pull(reference: str, known: Collection[str], options: ServerOptions) -> None:
    """Raise `UnsupportedOption` unless the options allow to fetch `reference`.

    `known` are the models with short names.
    """
    needed = _source_of(reference, known)
    if not needed:
        _check_folder(path_of(place_of(reference)), options)
        return
    if PULL_SOURCES.index(options.pull_from) < PULL_SOURCES.index(needed):
        raise UnsupportedOption(
            f"This server fetches no such model (--pull-from {options.pull_from}); its operator may"
            f" start it with --pull-from {needed}.",
            param="model",
        )


def is_hub_id(reference: str, known: Collection[str]) -> bool:
    """Whether a reference names a repository of the hub."""
    return _source_of(reference, known) == _HUB


def _source_of(reference: str, known: Collection[str]) -> str:
    """The value of `--pull-from` that a reference needs; empty for a folder or a file."""
    place = place_of(reference)
    if place in (EMBEDDED_REFERENCE, EMBEDDED_NAME, *known):
        return _NAMES
    if place.startswith("pypi:"):
        return _PACKAGES
    is_path = place.startswith(("/", ".", "~")) or place.endswith(_FILES)
    return "" if is_path or path_of(place).exists() else _HUB


def _check_folder(path: Path, options: ServerOptions) -> None:
    roots = [Path(root).expanduser().resolve() for root in options.pull_folder]
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise UnsupportedOption(
            "This server takes no model from that folder; its operator may name the folder, or one"
            " above it, with --pull-folder.",
            param="model",
        )

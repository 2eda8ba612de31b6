"""The models that a running server may fetch on request.

Owns the options `--pull-from` and `--pull-folder` as a check of one reference. Fetches nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from triptych.core.errors import UnsupportedOption
from triptych.core.options.server import PULL_SOURCES, ServerOptions
from triptych.core.weights.resolve import EMBEDDED_NAME, EMBEDDED_REFERENCE, place_of

_NAMES, _PACKAGES, _HUB = PULL_SOURCES[1:]
_FILES = (".gguf", ".safetensors")


def check_may_pull(reference: str, known: Collection[str], options: ServerOptions) -> None:
    """Raise `UnsupportedOption` unless the options allow to fetch `reference`.

    `known` are the models with short names.
    """
    place = place_of(reference)
    path = Path(place).expanduser()
    if place in (EMBEDDED_REFERENCE, EMBEDDED_NAME, *known):
        needed = _NAMES
    elif place.startswith("pypi:"):
        needed = _PACKAGES
    elif place.startswith(("/", ".", "~")) or place.endswith(_FILES) or path.exists():
        _check_folder(path, options)
        return
    else:
        needed = _HUB
    if PULL_SOURCES.index(options.pull_from) < PULL_SOURCES.index(needed):
        raise UnsupportedOption(
            f"This server fetches no such model (--pull-from {options.pull_from}); its operator may"
            f" start it with --pull-from {needed}.",
            param="model",
        )


def _check_folder(path: Path, options: ServerOptions) -> None:
    roots = [Path(root).expanduser().resolve() for root in options.pull_folder]
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise UnsupportedOption(
            "This server takes no model from that folder; its operator may name the folder, or one"
            " above it, with --pull-folder.",
            param="model",
        )

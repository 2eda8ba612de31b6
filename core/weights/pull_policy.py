"""The models that a running server may fetch on request.

Owns the options `--pull-from` and `--pull-folder` as a check of one reference. Fetches nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from triptych.core.errors import UnsupportedOption
from triptych.core.options.server import PULL_SOURCES, ServerOptions
from triptych.core.weights.resolve import EMBEDDED_NAME, EMBEDDED_REFERENCE, path_of, place_of

_NAMES, _PACKAGES, _HUB = PULL_SOURCES[1:]
_FILES = (".gguf", ".safetensors")
_PARAMS: Mapping[str, str] = MappingProxyType({"model": "model", "adapter": "lora_path"})
"""The field of a request that names something of a kind."""


def check_may_pull(reference: str, known: Collection[str], options: ServerOptions) -> None:
    """Raise `UnsupportedOption` unless the options allow to fetch `reference`.

    `known` are the models with short names.
    """
    needed = _source_of(reference, known)
    if needed:
        _check_source(needed, options, "model")
    else:
        _check_folder(path_of(place_of(reference)), options, "model")


def check_may_load_adapter(place: str, options: ServerOptions) -> None:
    """Raise `UnsupportedOption` unless the options allow to load the adapter at `place`.

    It is a path or a hub id as it stands, without a name before `=`.
    """
    if _is_path(place):
        _check_folder(path_of(place), options, "adapter")
    else:
        _check_source(_HUB, options, "adapter")


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
    return "" if _is_path(place) else _HUB


def _is_path(place: str) -> bool:
    if place.startswith(("/", ".", "~")) or place.endswith(_FILES):
        return True
    with suppress(OSError, ValueError):  # of a text that no path can be
        return path_of(place).exists()
    return False


def _check_source(needed: str, options: ServerOptions, kind: str) -> None:
    if PULL_SOURCES.index(options.pull_from) < PULL_SOURCES.index(needed):
        raise UnsupportedOption(
            f"This server fetches no such {kind} (--pull-from {options.pull_from}); its operator"
            f" may start it with --pull-from {needed}.",
            param=_PARAMS[kind],
        )


def _check_folder(path: Path, options: ServerOptions, kind: str) -> None:
    roots = [Path(root).expanduser().resolve() for root in options.pull_folder]
    with suppress(OSError, ValueError, RuntimeError):  # of a path that cannot be, or is a loop
        if any(path.resolve().is_relative_to(root) for root in roots):
            return
    raise UnsupportedOption(
        f"This server takes no {kind} from that folder; its operator may name the folder, or one"
        " above it, with --pull-folder.",
        param=_PARAMS[kind],
    )

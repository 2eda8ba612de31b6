"""The adapters of `--lora-paths`: their names and places.

Owns the format of the option, and the check of a request's adapters. Loads no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from triptych.core.errors import ConfigError, InvalidRequest
from triptych.core.options.config import ImageOptions
from triptych.modalities.diffusion.wire import AdapterUse

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.:@-]*)=(?P<place>.+)")
MAX_SCALE = 100.0


def adapter_places(options: ImageOptions) -> dict[str, str]:
    """The place of each adapter (a file, a folder or a hub id), by name.

    Without `name=` an adapter is named after its file. Raises `ConfigError` for a duplicate name.
    """
    places: dict[str, str] = {}
    if not options.enable_lora:
        return places
    for given in options.lora_paths:
        match = _NAMED.fullmatch(given)
        name, place = (match["name"], match["place"]) if match else (Path(given).stem, given)
        if name in places:
            raise ConfigError(f"Two adapters are called {name!r}; write --lora-paths NAME=PLACE.")
        places[name] = place
    return places


def check_uses(uses: Sequence[AdapterUse], known: Collection[str]) -> tuple[AdapterUse, ...]:
    """The adapters that act, each once, sorted by name.

    Raises `InvalidRequest` for an unknown name, listing the known ones, or a scale out of range.
    """
    scales: dict[str, float] = {}
    for use in uses:
        if use.name not in known:
            names = ", ".join(sorted(known)) or "none; add adapters with --lora-paths"
            raise InvalidRequest(
                f"There is no adapter {use.name!r:.80}; adapters: {names}.", param="lora"
            )
        scales[use.name] = scales.get(use.name, 0.0) + use.scale
    if not all(math.isfinite(scale) and abs(scale) <= MAX_SCALE for scale in scales.values()):
        raise InvalidRequest(
            f"An adapter's scale must be a number from -{MAX_SCALE:g} to {MAX_SCALE:g}.",
            param="lora",
        )
    return tuple(AdapterUse(name, scale) for name, scale in sorted(scales.items()) if scale)

"""What `--lora-paths` says: which adapters there are, by which names, and where.

Owns the option's spelling, and the check of what a request asks for. Loads no torch.
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
    """Where each adapter is (a file, a folder or a hub id), by its name.

    Without `name=` an adapter is called as its file is. Raises `ConfigError` for a name given
    twice.
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
    """The adapters that act, each once, in order of name.

    Raises `InvalidRequest` for a name that is not known, naming those that are, or an unfit scale.
    """
    scales: dict[str, float] = {}
    for use in uses:
        if use.name not in known:
            names = ", ".join(sorted(known)) or "none; --lora-paths adds some"
            raise InvalidRequest(
                f"There is no adapter {use.name!r:.80}; there are: {names}.", param="lora"
            )
        scales[use.name] = scales.get(use.name, 0.0) + use.scale
    if not all(math.isfinite(scale) and abs(scale) <= MAX_SCALE for scale in scales.values()):
        raise InvalidRequest(
            f"An adapter's scale is a number from -{MAX_SCALE:g} to {MAX_SCALE:g}.", param="lora"
        )
    return tuple(AdapterUse(name, scale) for name, scale in sorted(scales.items()) if scale)

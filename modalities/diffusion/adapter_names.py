"""The check of a request's adapters, by name and scale. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.wire import AdapterUse

MAX_SCALE = 100.0


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

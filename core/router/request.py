"""A request as the router sees it: its model, adapters and prefix keys.

Owns the keys. They are hashes of prompt tokens, since characters show neither page boundaries nor
what templates and images add. They cover prefixes whose lengths double, so that a prompt has only a
few, and are valid within one process. Prompts with equal keys are taken to be equal; at worst, a
request goes to a replica that must compute its prompt.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from triptych.core.engine_api.tokens import TokenRequest

CUTS = tuple(64 << level for level in range(10))
"""Lengths in tokens of the prefixes that have keys."""


class RouteChoice(NamedTuple):
    """The choice of a replica for a request, with the estimates behind it.

    The replica had `wait_s` seconds of work queued, the least busy one `least_wait_s`.
    `held_tokens` of the prompt were probably cached there, which saves `saved_s`.
    """

    replica: str
    wait_s: float = 0.0
    least_wait_s: float = 0.0
    held_tokens: int = 0
    saved_s: float = 0.0


class RoutedRequest(NamedTuple):
    """A request to route.

    `keys` are those of its prompt's prefixes of the lengths `CUTS`. `adapter` is the key of its
    adapters, 0 without any. `avoided` are replicas that refused or lost it. The router appends each
    choice to `choices`, for later explanation.
    """

    model: str
    keys: tuple[int, ...] = ()
    num_tokens: int = 0
    adapter: int = 0
    avoided: tuple[str, ...] = ()
    choices: list[RouteChoice] | None = None

    @classmethod
    def of(cls, model: str, request: Any) -> RoutedRequest:
        """Build it from a request of any modality."""
        if isinstance(request, TokenRequest):
            prompt = request.prompt_ids
            keys = prefix_keys((model, request.adapter, request.tenant), prompt)
            adapter = hash((model, request.adapter)) if request.adapter else 0
            return cls(model, keys, len(prompt), adapter)
        names = tuple(sorted(use.name for use in getattr(request, "adapters", ())))
        return cls(model, adapter=hash((model, names)) if names else 0)


def prefix_keys(root: Hashable, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the chained keys of a prompt's prefixes; `root` is hashed into all of them."""
    keys: list[int] = []
    key, start = hash(root), 0
    for cut in CUTS:
        if cut > len(token_ids):
            break
        key = hash((key, token_ids[start:cut]))
        keys.append(key)
        start = cut
    return tuple(keys)

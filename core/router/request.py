"""What a router knows of a request: its model, and keys of what a replica may hold of it.

Owns the keys. They are made where the prompt has been tokenized, of tokens: characters say neither
where a page ends nor what images and templates put before them. They name a prompt's beginnings
at lengths that double, so that a prompt of any length has a handful of them, and mean something
within one process only: two prompts with equal keys are taken to be equal, and at worst a request
goes to a replica that has to compute it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from triptych.core.engine_api.tokens import TokenRequest

CUTS = tuple(64 << level for level in range(10))
"""Lengths in tokens of the beginnings that have keys."""


class RouteChoice(NamedTuple):
    """Why a request went to a replica: what was known of it then.

    Before the request there were `wait_s` seconds of work, on the replica with least to do
    `least_wait_s`. Of its prompt `held_tokens` are likely to be cached there, which saves
    `saved_s`.
    """

    replica: str
    wait_s: float = 0.0
    least_wait_s: float = 0.0
    held_tokens: int = 0
    saved_s: float = 0.0


class RoutedRequest(NamedTuple):
    """A request as a router sees it.

    `keys` are those of its prompt's beginnings, as long as `CUTS` says. `adapter` is the key of the
    adapters it runs with, 0 where there are none. Replicas that refused or lost it are `avoided`.
    Where it went is added to `choices`, for whoever asks later.
    """

    model: str
    keys: tuple[int, ...] = ()
    num_tokens: int = 0
    adapter: int = 0
    avoided: tuple[str, ...] = ()
    choices: list[RouteChoice] | None = None

    @classmethod
    def of(cls, model: str, request: Any) -> RoutedRequest:
        """What there is to know of a request of any modality."""
        if isinstance(request, TokenRequest):
            prompt = request.prompt_ids
            keys = prefix_keys((model, request.adapter, request.tenant), prompt)
            adapter = hash((model, request.adapter)) if request.adapter else 0
            return cls(model, keys, len(prompt), adapter)
        names = tuple(sorted(use.name for use in getattr(request, "adapters", ())))
        return cls(model, adapter=hash((model, names)) if names else 0)


def prefix_keys(root: Hashable, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Keys of the beginnings of a prompt, each following from the one before; `root` is shared."""
    keys: list[int] = []
    key, start = hash(root), 0
    for cut in CUTS:
        if cut > len(token_ids):
            break
        key = hash((key, token_ids[start:cut]))
        keys.append(key)
        start = cut
    return tuple(keys)

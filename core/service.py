"""What the services of all modalities have in common: callers, models by name, seeds, held amounts.

Owns these small types and functions. Knows neither HTTP nor any modality.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from triptych.core.config import Config
from triptych.core.errors import Overloaded, UnknownModel

Model = TypeVar("Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller. `key` tells callers apart in admission and logs; `tenant` salts their cache.

    `owner` is to whom belongs what outlives the process, such as voices: the same in every run.
    """

    key: str = ""
    tenant: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request; by default the user of this process, under a new id.

    `call_id` begins the ids of its jobs, each of which may take `deadline_s`.
    """

    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    principal: Principal = Principal()
    deadline_s: float | None = None


def find_model(models: Mapping[str, Model], name: str, kind: str = "model") -> Model:
    """The model called `name`. Raises `UnknownModel`, which lists those of this `kind`."""
    if name not in models:
        raise UnknownModel.among(models, name, kind)
    return models[name]


def configured_seed(config: Config) -> int | None:
    """The seed of requests without one, where the operator sets it."""
    return config.device.seed if config.device.seed >= 0 else None


def choose_seed(*wanted: int | None, num_bits: int = 62) -> int:
    """The first seed that is given, or a random one."""
    return next((seed for seed in wanted if seed is not None), secrets.randbits(num_bits))


class HeldAmount:
    """What the requests of a service hold together of something, which must stay below `most`."""

    def __init__(self, most: float, refusal: str) -> None:
        self._most = most
        self._refusal = refusal
        self._held = 0.0

    @contextmanager
    def hold(self, amount: float) -> Iterator[None]:
        """Hold `amount` more meanwhile. Raises `Overloaded` where that is too much."""
        if self._held + amount > self._most:
            raise Overloaded(self._refusal, retry_after_s=5.0)
        self._held += amount
        try:
            yield
        finally:
            self._held -= amount

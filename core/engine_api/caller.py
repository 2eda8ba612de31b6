"""The caller of a request: what a service needs to know besides the request itself.

Owns these types. Knows neither HTTP nor any modality.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller. `key` distinguishes callers in admission and logs; `tenant` salts their cache.

    `owner` owns what outlives the process, such as voices: the same in every run.
    """

    key: str = ""
    tenant: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request; by default the user of this process, under a new id.

    `call_id` begins the ids of its jobs, each of which may take `deadline_s`. `client` is what
    service is shared between: the key, or the `connection` where there are no keys.
    """

    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    principal: Principal = Principal()
    deadline_s: float | None = None
    connection: str = ""

    @property
    def client(self) -> str:
        """The name under which its jobs receive service."""
        return self.principal.key or self.connection

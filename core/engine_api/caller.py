"""The caller of a request: identity, time limit and connection.

Owns these types. Knows neither HTTP nor any modality.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller's identity. `key` identifies it in admission and logs.

    `tenant` salts its cache keys, so that no tenant hits an entry of another.
    `owner` owns data that outlives the process, such as voices: it is the same in every run.
    """

    key: str = ""
    tenant: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request; by default the user of this process, under a new id.

    `call_id` prefixes the ids of its jobs. `deadline_s` is the time that each may take, from its
    arrival. Scheduling is fair between `client`s: the key, or without keys the `connection`.
    """

    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    principal: Principal = Principal()
    deadline_s: float | None = None
    connection: str = ""

    @property
    def client(self) -> str:
        """The name under which its jobs are scheduled fairly."""
        return self.principal.key or self.connection

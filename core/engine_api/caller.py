"""The caller of a request: identity, time limit and connection.

Owns these types, and the record of a request for the access log. Knows neither HTTP nor any
modality.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller's identity. `key` identifies it in admission and logs.

    `tenant` salts its cache keys, so that no tenant hits an entry of another.
    `owner` owns data that outlives the process, such as voices: it is the same in every run.
    A caller that `is_admin` may change what the server has loaded.
    """

    key: str = ""
    tenant: str = ""
    owner: str = ""
    is_admin: bool = False


@dataclass(slots=True, kw_only=True)
class AccessRecord:
    """The model and the token counts of a request, for the log; `None` where it has none."""

    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def add_prompt(self, model: str, num_tokens: int) -> None:
        """Set the model, and add to the tokens that it reads."""
        self.model = model
        self.prompt_tokens = (self.prompt_tokens or 0) + num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request; by default the user of this process, under a new id.

    `call_id` prefixes the ids of its jobs. `deadline_s` is the time that each may take, from its
    arrival. Scheduling is fair between `client`s: the key, or without keys the `connection`.
    Services fill in the `record`.
    """

    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    principal: Principal = Principal()
    deadline_s: float | None = None
    connection: str = ""
    record: AccessRecord = field(default_factory=AccessRecord)

    @property
    def client(self) -> str:
        """The name under which its jobs are scheduled fairly."""
        return self.principal.key or self.connection

"""A job: one admitted unit of work, from submission to its last output.

Owns the life cycle every modality shares. What a job computes (tokens, latents, audio) belongs to
the scheduler that runs it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from triptych.core.errors import ErrorInfo

Request = TypeVar("Request", default=Any)
"""The modality's own request type; the codec names it, other code passes it on."""
Payload = TypeVar("Payload", default=Any)
"""The modality's own output type; the codec names it, other code passes it on."""


class JobState(enum.Enum):
    """Where a job stands. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come of the job."""
        return self in (JobState.FINISHED, JobState.CANCELLED, JobState.FAILED)


class Output(
    msgspec.Struct, Generic[Payload], frozen=True, kw_only=True, tag=True, omit_defaults=True
):
    """One message of a job's stream. `payload` is the modality's own type; the last is final."""

    job_id: str
    payload: Payload | None = None
    is_final: bool = False
    error: ErrorInfo | None = None


Sink = Callable[[Output], None]
"""Where the engine puts a job's outputs. Must not block; called on the engine's thread."""


def discard(output: Output) -> None:
    """The sink of a job that has no reader."""


class Job(msgspec.Struct, Generic[Request], kw_only=True, tag=True, omit_defaults=True):
    """What an API process asks for, and what the loop needs to know of it.

    It may take `limit_s` from its arrival. Service is shared between the `client`s that jobs come
    from. The fields after that are the engine's: they stay with
    it. Schedulers keep their own state beside a job.
    """

    job_id: str
    model: str
    request: Request
    limit_s: float | None = None
    client: str = ""
    sink: Sink = discard
    arrival_s: float = 0.0
    state: JobState = JobState.WAITING
    is_paused: bool = False
    timings: dict[str, float] = {}

    @property
    def deadline_s(self) -> float | None:
        """When it must be over, by the engine's clock."""
        return None if self.limit_s is None else self.arrival_s + self.limit_s

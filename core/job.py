"""A job: one admitted unit of work, from submission to its last output.

Owns the life cycle every modality shares. What a job computes (tokens, latents, audio) belongs to
the scheduler that runs it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from triptych.core.errors import ErrorInfo

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


class Output(msgspec.Struct, Generic[Payload], frozen=True, kw_only=True, omit_defaults=True):
    """One message of a job's stream. `payload` is the modality's own type; the last is final."""

    job_id: str
    payload: Payload | None = None
    is_final: bool = False
    error: ErrorInfo | None = None


Sink = Callable[[Output], None]
"""Where the engine puts a job's outputs. Must not block; called on the engine's thread."""


@dataclass(slots=True, kw_only=True)
class Job:
    """What the loop needs to know of any job. Schedulers keep their own state beside it."""

    job_id: str
    model: str
    request: Any
    sink: Sink
    arrival_s: float
    deadline_s: float | None = None
    state: JobState = JobState.WAITING
    is_paused: bool = False
    timings: dict[str, float] = field(default_factory=dict)

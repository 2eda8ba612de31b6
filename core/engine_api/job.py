"""A job: one admitted unit of work, from submission to its last output.

Owns the types that all modalities share: the job, its states, and the messages of its stream. The
scheduler that runs a job changes its state, and computes tokens, latents or audio.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from triptych.core.engine_api.job_report import JobRecorder, JobReport
from triptych.core.errors import ErrorInfo

Request = TypeVar("Request", default=Any)
"""The modality's own request type. The codec lists these types; shared code passes it on unread."""
Payload = TypeVar("Payload", default=Any)
"""The modality's own output type. The codec lists these types; shared code passes it on unread."""


class JobState(enum.Enum):
    """The state of a job. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether the job is over."""
        return self in (JobState.FINISHED, JobState.CANCELLED, JobState.FAILED)


class Output(msgspec.Struct, Generic[Payload], frozen=True, kw_only=True, omit_defaults=True):
    """One message of a job's stream. `payload` is the modality's own type.

    The last one `is_final` and has the `report` on the job, if the engine made it.
    """

    job_id: str
    payload: Payload | None = None
    is_final: bool = False
    error: ErrorInfo | None = None
    report: JobReport | None = None


Sink = Callable[[Output], None]
"""Receives a job's outputs. Called on the engine's thread; must not block."""


def discard(output: Output) -> None:
    """The sink of a job that has no reader."""


class Job(msgspec.Struct, Generic[Request], kw_only=True, tag=True, omit_defaults=True):
    """A request to the engine, with the loop's bookkeeping.

    It may take `limit_s` from its arrival. Scheduling is fair between `client`s. The fields after
    `client` are the engine's own and never sent. `sink` takes any output of the job; `feed` those
    alone that are not the last, at less cost, and is the sink where none is given. Schedulers keep
    their state separately.
    """

    job_id: str
    model: str
    request: Request
    limit_s: float | None = None
    client: str = ""
    sink: Sink = discard
    feed: Sink = discard
    arrival_s: float = 0.0
    state: JobState = JobState.WAITING
    is_paused: bool = False
    timings: dict[str, float] = {}
    record: JobRecorder | None = None

    def __post_init__(self) -> None:
        if self.feed is discard:
            self.feed = self.sink

    @property
    def recorder(self) -> JobRecorder:
        """The account of the job, begun on first use."""
        if self.record is None:
            self.record = JobRecorder(self.arrival_s)
        return self.record

    @property
    def deadline_s(self) -> float | None:
        """The time by which it must be over, by the engine's clock."""
        return None if self.limit_s is None else self.arrival_s + self.limit_s

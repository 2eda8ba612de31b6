"""The recent jobs of an engine client, and the accounts that the engine made of them.

Owns a bounded list, the oldest dropped first. Knows nothing of requests: a call is the part of a
job's id before its first dot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.core.engine_api.job_report import JobReport

MAX_JOBS = 4096


@dataclass(slots=True, kw_only=True)
class JournalEntry:
    """A job that was submitted at `submitted_s` (monotonic), and its end, once it has ended.

    `report` is missing if the engine died before it could send one. `error` is a code.
    """

    job_id: str
    model: str
    submitted_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    report: JobReport | None = None
    error: str = ""


def call_of(job_id: str) -> str:
    """Return the call that a job belongs to."""
    return job_id.partition(".")[0]


def is_of_call(job_id: str, call_id: str) -> bool:
    """Whether a job belongs to a call, or to the answer of a socket: its id has a dot."""
    return job_id == call_id or job_id.startswith(f"{call_id}.")


class JobJournal:
    """The recent jobs, by call."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._followers: list[Callable[[JournalEntry], None]] = []
        self._max_jobs = max_jobs
        self._jobs: dict[str, JournalEntry] = {}
        self._calls: dict[str, list[JournalEntry]] = {}

    def follow(self, follower: Callable[[JournalEntry], None]) -> None:
        """Call `follower` with each job whose account arrives; it must not raise."""
        self._followers.append(follower)

    def open(self, job_id: str, model: str) -> None:
        """Add a job."""
        entry = self._jobs[job_id] = JournalEntry(job_id=job_id, model=model)
        self._calls.setdefault(call_of(job_id), []).append(entry)
        if len(self._jobs) > self._max_jobs:
            self._drop(next(iter(self._jobs)))

    def end(self, job_id: str, error: str = "") -> None:
        """Record that a job has ended for its reader."""
        entry = self._jobs.get(job_id)
        if entry is not None and entry.ended_s is None:
            entry.ended_s, entry.error = time.monotonic(), error

    def add_report(self, job_id: str, report: JobReport) -> None:
        """Add the account of a job; that of a cancelled one comes after its end."""
        entry = self._jobs.get(job_id)
        if entry is not None:
            entry.report = report
            for follower in self._followers:
                follower(entry)

    def call(self, call_id: str) -> Sequence[JournalEntry]:
        """Return the jobs of a call or answer (`is_of_call`), in the order of their submission."""
        jobs = self._calls.get(call_of(call_id), ())
        return [job for job in jobs if is_of_call(job.job_id, call_id)]

    def _drop(self, job_id: str) -> None:
        entry = self._jobs.pop(job_id)
        siblings = self._calls[call_of(job_id)]
        siblings.remove(entry)
        if not siblings:
            del self._calls[call_of(job_id)]

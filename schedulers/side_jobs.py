"""Jobs of a model that take no step, such as loading an adapter: their threads and their ends.

Owns how such a job ends. What it does is its scheduler's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.errors import InternalError, TriptychError, to_info
from triptych.schedulers.executors import without_locals

Start = Callable[[Callable[[], None]], None]


def start_thread(call: Callable[[], None]) -> None:
    """Make a call on a thread of its own."""
    threading.Thread(target=call, name="triptych-adapter", daemon=True).start()


def error_of_load(load: Callable[[], None]) -> TriptychError | None:
    """Load an adapter; returns the error for the jobs that wait for it."""
    try:
        load()
    except TriptychError as raised:
        return without_locals(raised)
    except Exception as raised:  # a bug must not leave jobs waiting for ever
        without_locals(raised)
        return InternalError("The adapter could not be loaded; the server's log says why.")
    return None


def finish(job: Job, error: TriptychError | None = None) -> None:
    """End a job without a payload."""
    job.state = JobState.FINISHED if error is None else JobState.FAILED
    info = None if error is None else to_info(error)
    job.sink(Output(job_id=job.job_id, is_final=True, error=info))

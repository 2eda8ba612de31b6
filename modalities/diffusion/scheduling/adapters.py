"""Jobs that load an adapter into a running image model, or drop one.

Owns when: an adapter is loaded on a thread of its own while steps run, and dropped once no image
that uses it is left. Knows no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Protocol

from triptych.core.engine_api.job import Job, JobState
from triptych.core.engine_api.tokens import AdapterDrop, AdapterLoad
from triptych.core.errors import TriptychError
from triptych.schedulers.executors import Post
from triptych.schedulers.side_jobs import Start, error_of_load, finish, start_thread


class Store(Protocol):
    """The memory of adapters: `engine.adapters.store.ImageAdapterStore`."""

    def load(self, digest: str, place: str) -> None:
        """Load an adapter, on any thread."""

    def drop(self, digest: str) -> None:
        """Drop an adapter that no image uses."""


class AdapterJobs:
    """Loads and drops of one model. All methods run on the loop's thread.

    `is_used` says whether an image that has not ended, or is in a step in flight, uses an adapter.
    """

    def __init__(
        self, store: Store, is_used: Callable[[str], bool], *, start: Start = start_thread
    ) -> None:
        self._store, self._is_used, self._start = store, is_used, start
        self._post: Post = lambda call: call()
        self._loaded: set[str] = set()
        self._loads: defaultdict[str, list[Job]] = defaultdict(list)
        self._drops: defaultdict[str, list[Job]] = defaultdict(list)

    def connect(self, post: Post) -> None:
        """Register the function that posts calls to the loop's thread."""
        self._post = post

    def submit(self, job: Job) -> None:
        """Do what a job asks for; the job ends when it is done, or with the error."""
        job.state, request = JobState.RUNNING, job.request
        if isinstance(request, AdapterDrop):
            self._drops[request.digest].append(job)
            self.advance()
            return
        assert isinstance(request, AdapterLoad), "a load or a drop"
        self._end(self._drops, request.digest)  # without effect: it is wanted again
        self._loads[request.digest].append(job)
        if request.digest in self._loaded:
            self._end(self._loads, request.digest)
        elif len(self._loads[request.digest]) == 1:
            self._start(partial(self._load, request))

    def advance(self) -> None:
        """Drop what is to be dropped, and is neither used nor loading now."""
        for digest in tuple(self._drops):
            if digest in self._loads or self._is_used(digest):
                continue
            if digest in self._loaded:
                self._loaded.remove(digest)
                self._store.drop(digest)
            self._end(self._drops, digest)

    def _load(self, request: AdapterLoad) -> None:
        """On a thread of its own: load, and post the outcome."""
        error = error_of_load(partial(self._store.load, request.digest, request.place))
        self._post(partial(self._on_loaded, request.digest, error))

    def _on_loaded(self, digest: str, error: TriptychError | None) -> None:
        if error is None:
            self._loaded.add(digest)
        self._end(self._loads, digest, error)
        self.advance()

    def _end(
        self, jobs: dict[str, list[Job]], digest: str, error: TriptychError | None = None
    ) -> None:
        """End all jobs of an adapter."""
        for job in jobs.pop(digest, []):
            finish(job, error)

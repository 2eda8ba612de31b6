"""Which models are on the device: loading, idling out, giving way to others.

Owns every configured model's state (unloaded, loading, ready, failed) and the jobs that wait for
one to load. Loads run one at a time on a thread of their own, so the loop never waits for one.
Knows nothing of what a model is; the ledger says whether it fits. All methods belong to the
loop's thread, but `_load`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.reports import ModelState, ModelStatus
from triptych.core.errors import (
    InternalError,
    MemoryBudgetExceeded,
    ModelTooLarge,
    NotFound,
    Overloaded,
    SetupError,
    TriptychError,
    to_info,
)
from triptych.core.options.config import Config
from triptych.core.process.heap import trim_heap
from triptych.core.process.metrics import Metrics
from triptych.schedulers.base import LoadedModel, ModelLoader
from triptych.schedulers.cost import CostModel
from triptych.schedulers.executors import Clock, Executors, without_locals

RETRY_FAILED_AFTER_S = 10.0
"""A model that failed to load is not tried again for a new job before so long."""

MEMORY_RETRY_S = 5.0
"""When a job may try again, where no resident model is idle enough to be evicted."""

_log = logging.getLogger(__name__)

LoadDone = Callable[[TriptychError | None], None]


@dataclass(slots=True)
class _ModelEntry:
    loader: ModelLoader
    state: ModelState = "unloaded"
    progress: float = 0.0
    error: TriptychError | None = None
    loaded: LoadedModel | None = None
    is_closing: bool = False
    last_used_s: float = 0.0
    last_failed_s: float = -math.inf
    waiting: dict[str, Job] = field(default_factory=dict)
    listeners: list[LoadDone] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHooks:
    """What the model manager needs of the loop."""

    admit: Callable[[LoadedModel, Job], None]
    refuse: Callable[[Job, TriptychError], None]
    submit: Callable[[Job], None]
    is_idle: Callable[[str], bool]
    metrics: Metrics


class ModelManager:
    """Models by name."""

    def __init__(
        self,
        loaders: Sequence[ModelLoader],
        *,
        config: Config,
        clock: Clock,
        executors: Executors,
        hooks: LoopHooks,
    ) -> None:
        self._entries = {loader.name: _ModelEntry(loader) for loader in loaders}
        self._config = config
        self._clock = clock
        self._executors = executors
        self._hooks = hooks
        self._queue: deque[str] = deque()
        self._active: str | None = None
        self._at_start: set[str] = set()
        self._has_news = False
        self.ready: dict[str, LoadedModel] = {}
        self._costs: dict[str, CostModel] = {}

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way, or waits for others to leave."""
        return self._active is not None or bool(self._queue)

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Where every model stands."""
        return tuple(
            ModelStatus(
                model=name,
                state=entry.state,
                progress=entry.progress,
                error=to_info(entry.error) if entry.error is not None else None,
            )
            for name, entry in self._entries.items()
        )

    def take_news(self) -> bool:
        """Whether a state changed since the last call."""
        had_news, self._has_news = self._has_news, False
        return had_news

    def start(self) -> None:
        """Begin to load what the options want loaded at start."""
        if self._config.models.load == "startup":
            self._at_start.update(self._entries)
            for name in self._entries:
                self._enqueue(name)
        else:
            for name, entry in self._entries.items():
                self._executors.load(partial(self._check_size, name, entry.loader))

    def take(self, job: Job) -> None:
        """Hand a job to its model, now or when it is loaded. Raises `NotFound`, `Unavailable`."""
        entry = self._entry(job.model)
        entry.last_used_s = self._clock()
        if entry.loaded is not None:
            self._hooks.admit(entry.loaded, job)
            return
        self._refuse_hopeless(entry)
        entry.waiting[job.job_id] = job
        self._enqueue(job.model)

    def drop(self, job: Job) -> bool:
        """Forget a job that waits for its model; whether there was such a job."""
        return self._entries[job.model].waiting.pop(job.job_id, None) is not None

    def load(self, name: str, done: LoadDone) -> None:
        """Load a model now; `done` gets the outcome. Raises `NotFound`."""
        entry = self._entry(name)
        entry.last_used_s = self._clock()
        if entry.loaded is not None:
            done(None)
            return
        if isinstance(entry.error, ModelTooLarge):
            done(entry.error)
            return
        entry.listeners.append(done)
        self._enqueue(name)

    def touch(self, name: str) -> None:
        """Note that a model worked just now."""
        self._entries[name].last_used_s = self._clock()

    def unload_idle(self, now_s: float) -> float:
        """Unload models idle for `idle_unload_s`; the moment when the next one may be due."""
        limit_s = self._config.models.idle_unload_s
        next_s = float("inf")
        if limit_s <= 0:
            return next_s
        for name in tuple(self.ready):
            if not self._hooks.is_idle(name):
                continue
            due_s = self._entries[name].last_used_s + limit_s
            if due_s <= now_s:
                self._unload(name, f"idle for {limit_s:g} s")
            else:
                next_s = min(next_s, due_s)
        return next_s

    def close(self) -> None:
        """Begin no other load and release every model, after the steps in flight."""
        self._queue.clear()
        for name in tuple(self.ready):
            self._unload(name, "shutting down")

    def _entry(self, name: str) -> _ModelEntry:
        if name not in self._entries:
            raise NotFound(f"There is no model {name[:80]!r} here.", param="model")
        return self._entries[name]

    def _refuse_hopeless(self, entry: _ModelEntry) -> None:
        if len(entry.waiting) >= self._config.schedule.max_queue_size:
            raise Overloaded("Too many requests wait for this model to load.", retry_after_s=5.0)
        left_s = entry.last_failed_s + RETRY_FAILED_AFTER_S - self._clock()
        is_final = isinstance(entry.error, ModelTooLarge)  # the budget stays as it is
        if entry.state == "failed" and entry.error is not None and (is_final or left_s > 0):
            raise entry.error

    def _enqueue(self, name: str) -> None:
        if name == self._active or name in self._queue:
            return
        entry = self._entries[name]
        entry.state, entry.progress, entry.error = "loading", 0.0, None
        self._queue.append(name)
        self._pump()

    def _pump(self) -> None:
        """Start the next load, unless one runs or a model is still leaving the device."""
        self._has_news = True
        if self._active is None and self._queue and not self._is_leaving():
            name = self._active = self._queue.popleft()
            _log.info("model %s: loading", name)
            self._executors.load(partial(self._load, name, self._entries[name], self._clock()))

    def _is_leaving(self) -> bool:
        """Whether some model is on its way off the device; its memory comes free after that."""
        return any(entry.is_closing for entry in self._entries.values())

    def _load(self, name: str, entry: _ModelEntry, started_s: float) -> None:
        """On the loader's thread: load, and post what came of it."""

        def report(progress: float) -> None:
            entry.progress = progress

        try:
            loaded = entry.loader.load(report)
            trim_heap()  # weights as they were before they were packed
        except MemoryBudgetExceeded as error:
            # What others hold may have ended it before all that it needs was known.
            found = error if isinstance(error, ModelTooLarge) else _too_large(entry.loader)
            if found is None:
                self._executors.post(partial(self._make_room, name, without_locals(error)))
            else:
                self._executors.post(partial(self._give_up, name, without_locals(found)))
        except SetupError as error:
            self._executors.post(partial(self._give_up, name, without_locals(error)))
        except Exception as error:  # a loader's fault must not end the others' service
            _log.exception("model %s: loading failed", name)
            reported = (
                error
                if isinstance(error, TriptychError)
                else InternalError(f"Model {name} could not be loaded; the server's log says why.")
            )
            self._executors.post(partial(self._give_up, name, without_locals(reported)))
        else:
            self._executors.post(partial(self._finish, name, loaded, started_s))

    def _finish(self, name: str, loaded: LoadedModel, started_s: float) -> None:
        now_s = self._clock()
        _log.info("model %s: ready after %.1f s", name, now_s - started_s)
        self._hooks.metrics.add("triptych_model_loads_total", model=name)
        entry = self._entries[name]
        entry.state, entry.progress, entry.loaded, entry.last_used_s = "ready", 1.0, loaded, now_s
        self.ready[name] = loaded
        loaded.connect(self._executors.post)
        loaded.attach(self._hooks.submit)
        if name in self._costs:  # it was here before
            loaded.scheduler.costs.resume(self._costs[name])
        self._costs[name] = loaded.scheduler.costs
        waiting, entry.waiting = entry.waiting, {}
        for job in waiting.values():
            self._hooks.admit(loaded, job)
        self._conclude(name, None)
        self._pump()

    def _make_room(self, name: str, error: MemoryBudgetExceeded) -> None:
        """The ledger has no room: send the idlest model away and try again, or give up.

        A load without a waiting job must not evict: models loaded before would not stay.
        """
        entry = self._entries[name]
        idle = [other for other in self.ready if self._hooks.is_idle(other)]
        if self._is_leaving():
            self._load_again(name)
        elif idle and (entry.waiting or entry.listeners):
            victim = min(idle, key=lambda other: self._entries[other].last_used_s)
            self._unload(victim, f"giving way to {name}")
            self._load_again(name)
        elif self.ready:
            _log.warning("model %s: no room now: %s", name, error.message)
            self._give_up(
                name,
                Overloaded(
                    f"Model {name} does not fit beside the models in use; try again later.",
                    retry_after_s=MEMORY_RETRY_S,
                ),
            )
        else:
            self._give_up(name, error)

    def _check_size(self, name: str, loader: ModelLoader) -> None:
        """On the loader's thread: see beforehand whether a model that loads later can ever fit."""
        if (error := _too_large(loader)) is not None:
            self._executors.post(partial(self._rule_out, name, without_locals(error)))

    def _rule_out(self, name: str, error: ModelTooLarge) -> None:
        entry = self._entries[name]
        if entry.state == "unloaded":
            entry.state, entry.error = "failed", error
            self._has_news = True
            _log.error("model %s: %s", name, error.message)
            self._end_if_nothing_is_left(error)

    def _load_again(self, name: str) -> None:
        """Before all others, once those that leave have left."""
        self._active = None
        self._queue.appendleft(name)
        self._pump()

    def _give_up(self, name: str, error: TriptychError) -> None:
        entry = self._entries[name]
        is_final = isinstance(error, SetupError | InternalError)
        entry.state = "failed" if is_final else "unloaded"
        entry.error, entry.last_failed_s = error, self._clock()
        self._hooks.metrics.add("triptych_model_load_failures_total", model=name)
        waiting, entry.waiting = entry.waiting, {}
        for job in waiting.values():
            self._hooks.refuse(job, error)
        was_at_start = name in self._at_start
        self._conclude(name, error)
        if is_final:
            _log.error("model %s: failed to load: %s", name, error.message)
        if isinstance(error, ModelTooLarge):
            self._end_if_nothing_is_left(error)
        elif is_final and was_at_start:
            # What cannot start must not pretend to serve, nor try for ever.
            raise error if isinstance(error, SetupError) else SetupError(error.message)
        self._pump()

    def _end_if_nothing_is_left(self, error: ModelTooLarge) -> None:
        """Raise `error` where no model fits; else the others are served, and this one refused."""
        if all(isinstance(entry.error, ModelTooLarge) for entry in self._entries.values()):
            raise error

    def _conclude(self, name: str, error: TriptychError | None) -> None:
        self._at_start.discard(name)
        self._active = None
        self._has_news = True
        listeners, self._entries[name].listeners = self._entries[name].listeners, []
        for done in listeners:
            done(error)

    def _unload(self, name: str, why: str) -> None:
        """Take a model off the device, between steps."""
        _log.info("model %s: unloading (%s)", name, why)
        self._hooks.metrics.add("triptych_model_unloads_total", model=name)
        entry = self._entries[name]
        loaded = self.ready.pop(name)
        entry.state, entry.progress, entry.loaded, entry.is_closing = "unloaded", 0.0, None, True

        def close() -> None:
            try:
                loaded.close()
            except Exception:  # a model that leaves badly must not take the device thread along
                _log.exception("model %s: unloading failed", name)
            self._executors.post(partial(self._left, entry))

        self._executors.run(close)

    def _left(self, entry: _ModelEntry) -> None:
        entry.is_closing = False
        self._pump()


def _too_large(loader: ModelLoader) -> ModelTooLarge | None:
    """Why a model can never fit, as far as that is known before it is loaded."""
    try:
        loader.check_size()
    except ModelTooLarge as error:
        return error
    except Exception as error:  # loading it says so, to those who ask for it
        _log.debug("model %s: its size is not known: %s", loader.name, error)
    return None

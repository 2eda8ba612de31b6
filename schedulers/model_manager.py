"""The models on the device: loading, unloading when idle, eviction for other models.

Owns every model's state (unloaded, loading, ready, failed), the jobs that wait for a model to load,
and the changes of the models while the engine runs. Loads run one at a time on another thread, so
the loop never waits for one. Knows nothing of what a model is; the ledger decides whether it fits.
All methods run on the loop's thread, except `_load`, `_check_size` and `_check_added`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.job_report import LOAD
from triptych.core.engine_api.model_changes import (
    AddModel,
    KeepModel,
    LoadModel,
    ModelChange,
    RemoveModel,
    Sleep,
    UnloadModel,
    Wake,
)
from triptych.core.engine_api.reports import ModelStatus
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
from triptych.schedulers.model_entry import (
    ModelEntry,
    OpenLoader,
    finite_or_never,
    is_held,
    open_nothing,
    too_large,
)
from triptych.schedulers.sleeping import ChangeDone, Sleeping, Waking

RETRY_FAILED_AFTER_S = 10.0
"""After a failed load, new jobs do not cause another one for this long."""

MEMORY_RETRY_S = 5.0
"""Retry time of a job that needs memory while no resident model can be evicted."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHooks:
    """The loop's methods that the model manager calls."""

    admit: Callable[[LoadedModel, Job], None]
    refuse: Callable[[Job, TriptychError], None]
    submit: Callable[[Job], None]
    is_idle: Callable[[str], bool]
    metrics: Metrics


class ModelManager:
    """Loads and unloads the models."""

    def __init__(
        self,
        loaders: Sequence[ModelLoader],
        *,
        config: Config,
        clock: Clock,
        executors: Executors,
        hooks: LoopHooks,
    ) -> None:
        self._entries = {loader.name: ModelEntry(loader) for loader in loaders}
        self._config = config
        self._clock = clock
        self._executors = executors
        self._hooks = hooks
        self._queue: deque[str] = deque()
        self._active: str | None = None
        self._at_start: set[str] = set()
        self._has_news = False
        self.is_start_shown = False  # by another output than the log
        self.ready: dict[str, LoadedModel] = {}
        self._costs: dict[str, CostModel] = {}
        self._sleep = Sleeping()
        self.open_loader: OpenLoader = open_nothing

    @property
    def is_asleep(self) -> bool:
        """Whether the models are out of memory until the engine is woken."""
        return self._sleep.is_on

    @property
    def is_loading(self) -> bool:
        """Whether a load is running or queued."""
        return self._active is not None or bool(self._queue)

    def statuses(self) -> tuple[ModelStatus, ...]:
        """The state of every model."""
        return tuple(
            ModelStatus(
                model=name,
                state=entry.state,
                progress=entry.progress,
                error=to_info(entry.error) if entry.error is not None else None,
                idle_s=self._idle_s(name, entry),
                num_loads=entry.num_loads,
                keep_s=finite_or_never(self._keep_s(entry)),
                reduced_context=entry.reduced_context,
            )
            for name, entry in self._entries.items()
        )

    def _idle_s(self, name: str, entry: ModelEntry) -> float:
        if entry.loaded is None or not self._hooks.is_idle(name):
            return 0.0
        return max(0.0, self._clock() - entry.last_used_s)

    def take_news(self) -> bool:
        """Whether a state changed since the last call."""
        had_news, self._has_news = self._has_news, False
        return had_news

    def start(self) -> None:
        """Start loading the models that the options want loaded at start."""
        if self._config.models.load == "startup":
            self._at_start.update(self._entries)
            for name in self._entries:
                self._enqueue(name)
        else:
            for name, entry in self._entries.items():
                self._executors.load(partial(self._check_size, name, entry.loader))

    def submit(self, job: Job) -> None:
        """Submit a job to its model, now or once it is loaded. Raises `NotFound`, `Unavailable`."""
        entry = self._entry(job.model)
        self._sleep.check()
        entry.last_used_s = self._clock()
        if entry.loaded is not None:
            self._hooks.admit(entry.loaded, job)
            return
        self._check_can_load(entry)
        job.recorder.wait(LOAD, self._clock())
        entry.waiting[job.job_id] = job
        self._enqueue(job.model)

    def drop(self, job: Job) -> bool:
        """Remove a job that waits for its model; whether there was one."""
        return self._entries[job.model].waiting.pop(job.job_id, None) is not None

    def change(self, change: ModelChange, done: ChangeDone) -> None:
        """Make a change; `done` receives the outcome. Raises `NotFound`, `Asleep`."""
        self._has_news = True
        match change:
            case AddModel(model):
                self._add(self.open_loader(model), done)
            case LoadModel(name):
                self._load_now(name, done)
            case RemoveModel(name, is_of_start):
                entry = self._entry(name)
                if is_of_start and entry.is_added:
                    done(None)
                else:
                    entry.leaving.append(done)
                    self._drop_left()
            case Sleep():
                names = [name for name, entry in self._entries.items() if is_held(entry)]
                self._sleep.begin(names, done)
            case Wake():
                self._wake(done)
            case KeepModel(name, idle_s):
                self._entry(name).keep_s = idle_s
                done(None)
            case UnloadModel(name):
                entry = self._entry(name)
                entry.is_unwanted = is_held(entry)
                done(None)

    def _load_now(self, name: str, done: ChangeDone) -> None:
        entry = self._entry(name)
        self._sleep.check()
        entry.last_used_s = self._clock()
        if entry.loaded is not None:
            done(None)
            return
        if isinstance(entry.error, ModelTooLarge):
            done(entry.error)
            return
        entry.listeners.append(done)
        self._enqueue(name)

    def _add(self, loader: ModelLoader, done: ChangeDone) -> None:
        entry = self._entries.get(loader.name)
        if entry is None:
            self._entries[loader.name] = ModelEntry(loader, is_added=True)
            self._executors.load(partial(self._check_added, loader, done))
        elif entry.leaving:
            entry.leaving.append(lambda error: self._add(loader, done))
        else:  # an earlier API process has added it
            done(None)

    def _check_added(self, loader: ModelLoader, done: ChangeDone) -> None:
        """On the loader's thread: check whether a new model can be loaded here."""
        try:
            loader.check_size()
        except SetupError as error:
            self._executors.post(partial(self._refuse_added, loader, done, without_locals(error)))
        except Exception as error:  # loading reports it
            _log.debug("model %s: its size is unknown: %s", loader.name, error)
            self._executors.post(partial(done, None))
        else:
            self._executors.post(partial(done, None))

    def _refuse_added(self, loader: ModelLoader, done: ChangeDone, error: SetupError) -> None:
        entry = self._entries.get(loader.name)
        if entry is not None and entry.loader is loader:
            entry.leaving.append(lambda gone: done(error))
            self._drop_left()
        else:  # it was removed meanwhile
            done(error)

    def _drop_left(self) -> None:
        """Drop the models that were removed and are out of memory."""
        for name, entry in tuple(self._entries.items()):
            if entry.leaving and not is_held(entry) and not entry.is_closing:
                del self._entries[name]
                self._costs.pop(name, None)
                self._has_news = True
                for done in entry.leaving:
                    done(None)

    def _wake(self, done: ChangeDone) -> None:
        """Load the models of the sleep again; `done` receives the first error."""
        slept = {name: self._entries.get(name) for name in self._sleep.end()}
        names = [name for name, entry in slept.items() if entry is not None and not entry.leaving]
        waking = Waking(len(names), done)
        for name in names:
            self._load_now(name, waking.note)

    def touch(self, name: str) -> None:
        """Record that a model is in use."""
        self._entries[name].last_used_s = self._clock()

    def unload_due(self, now_s: float) -> float:
        """Unload models that are unwanted or idle for too long; returns when one may be due."""
        next_s = math.inf
        for name in tuple(self.ready):
            entry = self._entries[name]
            keep_s = self._keep_s(entry)
            is_unwanted = self._sleep.is_on or entry.is_unwanted or bool(entry.leaving)
            if not (is_unwanted or keep_s < math.inf) or not self._hooks.is_idle(name):
                continue
            if is_unwanted:
                self._unload(name, "asleep" if self._sleep.is_on else "on request")
            elif (due_s := entry.last_used_s + keep_s) <= now_s:
                self._unload(name, f"idle for {keep_s:g} s")
            else:
                next_s = min(next_s, due_s)
        self._drop_left()
        is_free = not (self._is_unloading() or any(map(is_held, self._entries.values())))
        if is_free and self._sleep.is_waited_for:
            self._sleep.note_free()
        return next_s

    def _keep_s(self, entry: ModelEntry) -> float:
        """How long a model stays in memory without jobs."""
        limit_s = self._config.models.idle_unload_s
        return (limit_s or math.inf) if entry.keep_s is None else entry.keep_s

    def close(self) -> None:
        """Cancel queued loads and release every model, after the steps in flight."""
        self._queue.clear()
        for name in tuple(self.ready):
            self._unload(name, "shutting down", logging.DEBUG)

    def _entry(self, name: str) -> ModelEntry:
        """The entry of a model that takes jobs. Raises `NotFound`."""
        entry = self._entries.get(name)
        if entry is None or entry.leaving:
            raise NotFound(f"There is no model {name[:80]!r} here.", param="model")
        return entry

    def _check_can_load(self, entry: ModelEntry) -> None:
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
        entry.num_loads += 1
        self._queue.append(name)
        self._start_next()

    def _start_next(self) -> None:
        """Start the next load, unless one runs or a model is still being unloaded."""
        self._has_news = True
        if self._active is None and self._queue and not self._is_unloading():
            name = self._active = self._queue.popleft()
            _log.log(self._level(name), "model %s: loading", name)
            self._executors.load(partial(self._load, name, self._entries[name], self._clock()))

    def _level(self, name: str, usual: int = logging.INFO) -> int:
        """The level of news about a load, which is lower where the start's output has them."""
        return logging.DEBUG if self.is_start_shown and name in self._at_start else usual

    def _is_unloading(self) -> bool:
        """Whether some model is being unloaded, so that memory will be free afterwards."""
        return any(entry.is_closing for entry in self._entries.values())

    def _load(self, name: str, entry: ModelEntry, started_s: float) -> None:
        """On the loader's thread: load, and post the outcome."""

        def report(progress: float) -> None:
            entry.progress = progress

        try:
            loaded = entry.loader.load(report)
            trim_heap()  # frees the weights as they were before packing
        except MemoryBudgetExceeded as error:
            # The load may have failed on other models' memory before its total need was known.
            found = error if isinstance(error, ModelTooLarge) else too_large(entry.loader)
            if found is None:
                self._executors.post(partial(self._make_room, name, without_locals(error)))
            else:
                self._executors.post(partial(self._fail_load, name, without_locals(found)))
        except SetupError as error:
            self._executors.post(partial(self._fail_load, name, without_locals(error)))
        except Exception as error:  # a loader's bug must not end the service of other models
            _log.exception("model %s: loading failed", name)
            reported = (
                error
                if isinstance(error, TriptychError)
                else InternalError(f"Model {name} could not be loaded; the server's log says why.")
            )
            self._executors.post(partial(self._fail_load, name, without_locals(reported)))
        else:
            self._executors.post(partial(self._finish, name, loaded, started_s))

    def _finish(self, name: str, loaded: LoadedModel, started_s: float) -> None:
        now_s = self._clock()
        _log.log(self._level(name), "model %s: ready after %.1f s", name, now_s - started_s)
        self._hooks.metrics.add("triptych_model_loads_total", model=name)
        entry = self._entries[name]
        entry.state, entry.progress, entry.loaded, entry.last_used_s = "ready", 1.0, loaded, now_s
        entry.reduced_context = loaded.reduced_context
        self.ready[name] = loaded
        loaded.connect(self._executors.post)
        loaded.attach(self._hooks.submit)
        if name in self._costs:  # it was loaded before
            loaded.scheduler.costs.resume(self._costs[name])
        self._costs[name] = loaded.scheduler.costs
        waiting, entry.waiting = entry.waiting, {}
        for job in waiting.values():
            self._hooks.admit(loaded, job)
        self._notify(name, None)
        self._start_next()

    def _make_room(self, name: str, error: MemoryBudgetExceeded) -> None:
        """Evict the model idle for longest and retry the load that lacks memory, or fail it.

        A load without a waiting job must not evict: models loaded before would not stay.
        """
        entry = self._entries[name]
        idle = [other for other in self.ready if self._hooks.is_idle(other)]
        if self._is_unloading():
            self._load_again(name)
        elif idle and (entry.waiting or entry.listeners):
            victim = min(idle, key=lambda other: self._entries[other].last_used_s)
            self._unload(victim, f"evicted for {name}")
            self._load_again(name)
        elif self.ready:
            level = self._level(name, logging.WARNING)
            _log.log(level, "model %s: no room now: %s", name, error.message)
            self._fail_load(
                name,
                Overloaded(
                    f"Model {name} does not fit next to the models in use; try again later.",
                    retry_after_s=MEMORY_RETRY_S,
                ),
            )
        else:
            self._fail_load(name, error)

    def _check_size(self, name: str, loader: ModelLoader) -> None:
        """On the loader's thread: check whether a model that loads later can ever fit."""
        if (error := too_large(loader)) is not None:
            self._executors.post(partial(self._mark_too_large, name, without_locals(error)))

    def _mark_too_large(self, name: str, error: ModelTooLarge) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.state == "unloaded":
            entry.state, entry.error = "failed", error
            self._has_news = True
            _log.error("model %s: %s", name, error.message)
            self._raise_if_none_fits(error)

    def _load_again(self, name: str) -> None:
        """Queue a load before all others, to start once unloads have finished."""
        self._active = None
        self._queue.appendleft(name)
        self._start_next()

    def _fail_load(self, name: str, error: TriptychError) -> None:
        entry = self._entries[name]
        is_final = isinstance(error, SetupError | InternalError)
        entry.state = "failed" if is_final else "unloaded"
        entry.error, entry.last_failed_s, entry.is_unwanted = error, self._clock(), False
        self._hooks.metrics.add("triptych_model_load_failures_total", model=name)
        waiting, entry.waiting = entry.waiting, {}
        for job in waiting.values():
            self._hooks.refuse(job, error)
        was_at_start = name in self._at_start
        if is_final:
            is_shown = isinstance(error, ModelTooLarge)  # at the start, which goes on
            level = self._level(name, logging.ERROR) if is_shown else logging.ERROR
            _log.log(level, "model %s: failed to load: %s", name, error.message)
        self._notify(name, error)
        if isinstance(error, ModelTooLarge):
            self._raise_if_none_fits(error)
        elif is_final and was_at_start:
            # A server that cannot start must neither pretend to serve nor retry for ever.
            raise error if isinstance(error, SetupError) else SetupError(error.message)
        self._start_next()

    def _raise_if_none_fits(self, error: ModelTooLarge) -> None:
        """Raise `error` if no model of the start fits; else its own requests alone are refused."""
        entries = self._entries.values()
        if all(isinstance(each.error, ModelTooLarge) and not each.is_added for each in entries):
            raise error

    def _notify(self, name: str, error: TriptychError | None) -> None:
        self._at_start.discard(name)
        self._active = None
        self._has_news = True
        listeners, self._entries[name].listeners = self._entries[name].listeners, []
        for done in listeners:
            done(error)

    def _unload(self, name: str, why: str, level: int = logging.INFO) -> None:
        """Unload a model from the device, between steps."""
        _log.log(level, "model %s: unloading (%s)", name, why)
        self._hooks.metrics.add("triptych_model_unloads_total", model=name)
        entry = self._entries[name]
        loaded = self.ready.pop(name)
        for counter, value in loaded.scheduler.stats().counters.items():  # for its next life
            self._hooks.metrics.add(f"triptych_{counter}", value, model=name)
        entry.state, entry.progress, entry.loaded, entry.is_closing = "unloaded", 0.0, None, True
        entry.is_unwanted = False

        def close() -> None:
            try:
                loaded.close()
            except Exception:  # a model that fails to unload must not end the device thread
                _log.exception("model %s: unloading failed", name)
            self._executors.post(partial(self._on_unloaded, entry))

        self._executors.run(close)

    def _on_unloaded(self, entry: ModelEntry) -> None:
        entry.is_closing = False
        self._start_next()

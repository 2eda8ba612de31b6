"""Changes of an engine's models while it runs.

Owns these types. Each is answered once: when it is done, or with the error that prevented it.
"""

from __future__ import annotations

import msgspec

from triptych.core.engine_api.resolved_model import ResolvedModel


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Load a model now instead of on first use. Done once it is ready."""

    model: str


class UnloadModel(msgspec.Struct, frozen=True, tag=True):
    """Unload a model as soon as no job needs it. Done at once."""

    model: str


class KeepModel(msgspec.Struct, frozen=True, tag=True):
    """Unload a model after `idle_s` seconds without a job, instead of the configured time."""

    model: str
    idle_s: float


class AddModel(msgspec.Struct, frozen=True, tag=True):
    """Serve one more model, from its first use. Done once it is known that it can be loaded."""

    model: ResolvedModel


class RemoveModel(msgspec.Struct, frozen=True, tag=True):
    """Serve a model no longer: it takes no new jobs. Done once it has left the memory.

    If it `is_of_start`, one of its name that came later stays.
    """

    model: str
    is_of_start: bool = False


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Unload all models, and refuse jobs until `Wake`. Done once the memory is free.

    Jobs in flight are finished first, or ended with `Asleep` if `ends_jobs`.
    """

    ends_jobs: bool = False


class Wake(msgspec.Struct, frozen=True, tag=True):
    """End the sleep. Done once the models that were in memory are back."""


ModelChange = LoadModel | UnloadModel | KeepModel | AddModel | RemoveModel | Sleep | Wake


class KeptChanges:
    """The changes to make again in an engine that replaces another: models, times and the sleep."""

    def __init__(self) -> None:
        self._added: dict[str, AddModel] = {}
        self._removed: dict[str, RemoveModel] = {}
        self._times: dict[str, KeepModel] = {}
        self._sleep: tuple[Sleep, ...] = ()

    def add(self, change: ModelChange) -> None:
        """Note a change that was made."""
        if isinstance(change, AddModel):
            self._added[change.model.name] = change
        elif isinstance(change, RemoveModel):
            self._times.pop(change.model, None)
            self._added.pop(change.model, None)
            self._removed[change.model] = RemoveModel(change.model, is_of_start=True)
        elif isinstance(change, KeepModel):
            self._times[change.model] = change
        elif isinstance(change, Sleep | Wake):
            self._sleep = (change,) if isinstance(change, Sleep) else ()

    def changes(self) -> tuple[ModelChange, ...]:
        """Return the changes, in an order in which they can be made."""
        removed: tuple[ModelChange, ...] = tuple(self._removed.values())
        return (*removed, *self._added.values(), *self._times.values(), *self._sleep)

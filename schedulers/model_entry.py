"""One model of an engine, as its manager keeps it.

Owns the record of a model's state and the questions about it alone. `schedulers.model_manager`
changes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.reports import ModelState
from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ModelTooLarge, TriptychError, UnsupportedOption
from triptych.schedulers.base import LoadedModel, ModelLoader
from triptych.schedulers.sleeping import ChangeDone

_log = logging.getLogger(__name__)

OpenLoader = Callable[[ResolvedModel], ModelLoader]


@dataclass(slots=True)
class ModelEntry:
    """A model's state. `keep_s` replaces the configured time that it stays in memory when idle.

    `leaving` are calls to make once it is gone; with one it takes no new jobs.
    """

    loader: ModelLoader
    is_added: bool = False
    """Whether it came after the start."""
    state: ModelState = "unloaded"
    progress: float = 0.0
    error: TriptychError | None = None
    loaded: LoadedModel | None = None
    is_closing: bool = False
    is_unwanted: bool = False
    keep_s: float | None = None
    num_loads: int = 0
    reduced_context: int = 0
    last_used_s: float = 0.0
    last_failed_s: float = -math.inf
    waiting: dict[str, Job] = field(default_factory=dict)
    listeners: list[ChangeDone] = field(default_factory=list)
    leaving: list[ChangeDone] = field(default_factory=list)


def is_held(entry: ModelEntry) -> bool:
    """Whether a model is in memory, or on its way there."""
    return entry.state in ("loading", "ready")


def finite_or_never(seconds: float) -> float:
    """A time as reports have it, where -1 is for ever."""
    return seconds if math.isfinite(seconds) else -1.0


def open_nothing(model: ResolvedModel) -> ModelLoader:
    """The default `open_loader`."""
    raise UnsupportedOption("This engine serves the models that it was started with.")


def too_large(loader: ModelLoader) -> ModelTooLarge | None:
    """Why a model can never fit, as far as is known before it is loaded."""
    try:
        loader.check_size()
    except ModelTooLarge as error:
        return error
    except Exception as error:  # loading reports it, to the requests for the model
        _log.debug("model %s: its size is unknown: %s", loader.name, error)
    return None

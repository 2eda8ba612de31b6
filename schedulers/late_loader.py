"""The loader of a model that comes while the engine runs.

Owns when it is opened: on the loader's thread, since that reads files and imports modules.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.weights.resolve import open_resolved
from triptych.schedulers.base import LoadedModel, ModelLoader


class LateLoader:
    """A `ModelLoader` that opens that of its model when it is first needed."""

    def __init__(
        self, open_loader: Callable[[ResolvedModel], ModelLoader], model: ResolvedModel
    ) -> None:
        self.name = model.name
        self._open_loader = open_loader
        self._model = model
        self._loader: ModelLoader | None = None

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Open and load; raises `WeightsError` for files that cannot be opened."""
        return self._opened().load(report)

    def check_size(self) -> None:
        """Open and check; raises `WeightsError` for files that cannot be opened."""
        self._opened().check_size()

    def _opened(self) -> ModelLoader:
        if self._loader is None:
            self._loader = open_resolved(self._model, self._open_loader)
        return self._loader

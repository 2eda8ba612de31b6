"""Model aliases: additional names for served models.

Owns the mapping from an alias to the engine's model name. Does not read options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from triptych.core.engine_api.client import EngineClient, EngineStatus, OutputStream
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.model_changes import ModelChange
from triptych.core.engine_api.step_feed import StepSink


class AliasClient:
    """An `EngineClient` that also accepts model `aliases`."""

    def __init__(self, client: EngineClient, aliases: Mapping[str, str]) -> None:
        self._client = client
        self.aliases = aliases

    @property
    def journal(self) -> JobJournal:
        """The recent jobs; see `EngineClient`."""
        return self._client.journal

    def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> OutputStream:
        """Submit a job; see `EngineClient`."""
        name = self.aliases.get(model, model)
        return self._client.submit(
            name, request, job_id=job_id, deadline_s=deadline_s, client=client
        )

    def status(self) -> EngineStatus:
        """The engine's state; see `EngineClient`."""
        return self._client.status()

    async def load(self, model: str) -> None:
        """Load a model; see `EngineClient`."""
        await self._client.load(self.aliases.get(model, model))

    async def unload(self, model: str) -> None:
        """Unload a model; see `EngineClient`."""
        await self._client.unload(self.aliases.get(model, model))

    async def change(self, change: ModelChange) -> None:
        """Change the models, by their own names; see `EngineClient`."""
        await self._client.change(change)

    def watch(self, sink: StepSink) -> Callable[[], None]:
        """Watch step reports; see `EngineClient`."""
        return self._client.watch(sink)

    async def close(self) -> None:
        """Close the client; see `EngineClient`."""
        await self._client.close()

"""One running recording, stage by stage.

Owns the protocol between a recording's work, written as a generator of stages, and the staged
runner. The family says what a stage computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.wire import TranscribeDelta


class Recording(ABC):
    """Implements `core.runtime.engine.staged_runner.Work`. `_start` begins the work."""

    _stages: Iterator[Stage]
    _delta: TranscribeDelta | None = None
    next_stage: Stage | None = None

    @abstractmethod
    def _run(self) -> Iterator[Stage]:
        """Announce each stage before its work, and leave results in `_delta`."""

    def _start(self) -> None:
        self._stages = self._run()
        self.next_stage = next(self._stages, None)

    def advance(self) -> TranscribeDelta | None:
        """Run the next stage. Raises `NonFinite` if the network computes NaN or infinity."""
        self.next_stage = next(self._stages, None)
        delta, self._delta = self._delta, None
        return delta

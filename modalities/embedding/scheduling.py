"""The schedule of an embedding request: one unit per text, without deadlines.

Owns a request's units for `schedulers.staged`. Runs in the engine process.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.embedding.wire import EmbedDelta
from triptych.schedulers.staged import JobPace


class BatchPace(JobPace):
    """A batch of texts whose results are returned together: one unit of one stage per text."""

    def __init__(self, stage: str, sizes: Sequence[int]) -> None:
        super().__init__(Stage(stage, 0), cancel_payload=EmbedDelta(finish_reason="cancelled"))
        self._sizes = sizes

    @property
    def num_units(self) -> int:
        """The number of texts."""
        return len(self._sizes)

    def first_stage(self, unit: int) -> Stage:
        """The text's only stage."""
        return Stage(self._first_stage.name, self._sizes[unit])

    def send(self, payload: EmbedDelta, now_s: float) -> EmbedDelta:
        """The payload; the last one gets the finish reason."""
        is_last = payload.text == len(self._sizes) - 1
        return msgspec.structs.replace(payload, finish_reason="stop") if is_last else payload

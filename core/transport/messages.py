"""The messages between the API process and the engine process.

Owns the envelope, its encoding (MessagePack) and its bound. What is inside (`Job.request`,
`Output.payload`) belongs to the modality and is decoded by the tagged union the composition root
registers. A message that does not decode is logged and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from triptych.core.errors import ErrorInfo
from triptych.core.job import Job, Output, Payload, Request

MAX_MESSAGE_BYTES = 64 * 2**20
"""A message above this is dropped; the largest prompt a request may bring is far below."""

_log = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """An API process is new here: what the one before it asked for is orphaned."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End jobs that have lost their reader."""

    job_ids: tuple[str, ...]


class SetPaused(msgspec.Struct, frozen=True, tag=True):
    """Hold jobs whose reader is slow, or let them go on."""

    job_ids: tuple[str, ...]
    is_paused: bool


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Load a configured model now instead of on first use."""

    model: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Report the steps that are run from now on, or no longer."""

    is_on: bool


ModelState = Literal["unloaded", "loading", "ready", "failed"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Where one model of the engine stands."""

    model: str
    state: ModelState
    progress: float = 0.0
    error: ErrorInfo | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Proof that the loop turns. Sent by the loop itself, at least every half second when idle.

    `turn` counts loop turns; `phase` is what the loop is about ("load", "step", "idle", ...);
    `stall_budget_s` is how long the next beat may take before the engine counts as hung. `gauges`
    and `counters` carry the metrics snapshot, named as Prometheus names with `{label="x"}` parts.
    """

    turn: int
    phase: str
    stall_budget_s: float
    num_jobs: int
    models: tuple[ModelStatus, ...]
    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, list[float]]


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step that is over, or several short ones of a kind as one.

    It began at `start_s` by the engine's clock (the system's monotonic one) and ended `length_s`
    later; for `busy_s` of it, it was the device's only work. A step that failed has no rows.
    """

    model: str
    kind: str
    num_rows: int
    start_s: float
    length_s: float
    busy_s: float
    num_steps: int = 1
    is_failed: bool = False


class RunningStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step that is on the device now."""

    model: str
    kind: str
    start_s: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What ran since the report before, by its start, and what runs now; sent while watched.

    The oldest `num_dropped` steps of the time are not among `steps`: there were too many.
    """

    steps: tuple[StepRecord, ...] = ()
    running: RunningStep | None = None
    num_dropped: int = 0


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The answer to `LoadModel`: how it went."""

    model: str
    error: ErrorInfo | None = None


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine is drained and about to exit."""


class EngineGone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor's word that the engine process died or was killed.

    `at_ns` is the system's monotonic clock: whatever an engine that started earlier still has on
    the way comes from the dead.
    """

    reason: str
    at_ns: int
    restart_in_s: float | None = None


ToEngine = Hello | Job[Request] | Cancel | SetPaused | LoadModel | Watch
FromEngine = Output[Payload] | Heartbeat | StepReport | Loaded | Goodbye | EngineGone


class MessageCodec:
    """Both directions. `request` and `payload` are tagged unions of the modalities' types.

    `codec.to_engine(codec.encode(Job(...)))` is the message again.
    """

    def __init__(self, *, request: Any, payload: Any) -> None:
        inbound: Any = ToEngine
        outbound: Any = FromEngine
        self.encode = msgspec.msgpack.Encoder().encode
        self.to_engine: Callable[[bytes], ToEngine | None] = _decoder(inbound[request])
        self.from_engine: Callable[[bytes], FromEngine | None] = _decoder(outbound[payload])


def _decoder(message_type: Any) -> Callable[[bytes], Any]:
    """A function from bytes to their message, or to `None` (and a line in the log)."""
    whole = msgspec.msgpack.Decoder(message_type)

    def decode(data: bytes) -> Any:
        if len(data) > MAX_MESSAGE_BYTES:
            _log.warning("dropped a message of %d bytes", len(data))
            return None
        try:
            return whole.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # The reason names fields and types, never content.
            _log.warning("dropped a malformed message: %s", type(error).__name__)
            return None

    return decode

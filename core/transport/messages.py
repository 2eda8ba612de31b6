"""The messages between the API process and the engine process.

Owns the envelope, its encoding (MessagePack) and its size bound. The content (`Job.request`,
`Output.payload`) belongs to the modality and is decoded by the tagged union that the composition
root registers. A message that does not decode is logged and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic

import msgspec

from triptych.core.engine_api.job import Job, Output, Payload, Request
from triptych.core.engine_api.model_changes import ModelChange
from triptych.core.engine_api.reports import Heartbeat, StepReport
from triptych.core.errors import ErrorInfo

MAX_MESSAGE_BYTES = 64 * 2**20
"""Larger messages are dropped; the largest permitted prompt is far below."""

_log = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A new API process has connected: jobs of the previous one are orphaned."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End jobs that have lost their reader."""

    job_ids: tuple[str, ...]


class SetPaused(msgspec.Struct, frozen=True, tag=True):
    """Pause jobs whose reader is slow, or resume them."""

    job_ids: tuple[str, ...]
    is_paused: bool


class Change(msgspec.Struct, frozen=True, tag=True):
    """Change the models; `call` is repeated in the answer, `Changed`."""

    change: ModelChange
    call: int = 0


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Start or stop reporting steps."""

    is_on: bool


class Changed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The answer to a `Change`: the error, if any."""

    call: int
    error: ErrorInfo | None = None


class Outputs(msgspec.Struct, Generic[Payload], frozen=True, tag=True):
    """All outputs of a turn of the engine's loop."""

    outputs: tuple[Output[Payload], ...]


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine is drained and about to exit."""


class EngineGone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The supervisor's notice that the engine process died or was killed.

    `at_ns` is the time on the system's monotonic clock: messages still in flight from engines that
    started earlier are to be ignored.
    """

    reason: str
    at_ns: int
    restart_in_s: float | None = None


ToEngine = Hello | Job[Request] | Cancel | SetPaused | Change | Watch
FromEngine = Outputs[Payload] | Heartbeat | StepReport | Changed | Goodbye | EngineGone


class MessageCodec:
    """Both directions. `request` and `payload` are tagged unions of the modalities' types.

    `codec.to_engine(codec.encode(message))` equals `message`.
    """

    def __init__(self, *, request: Any, payload: Any) -> None:
        inbound: Any = ToEngine
        outbound: Any = FromEngine
        self.encode = msgspec.msgpack.Encoder().encode
        self.to_engine: Callable[[bytes], ToEngine | None] = _decoder(inbound[request])
        self.from_engine: Callable[[bytes], FromEngine | None] = _decoder(outbound[payload])

    def encode_parts(self, message: FromEngine) -> list[bytes]:
        """The encoded message. Outputs too large for one are divided, down to single ones."""
        encoded = self.encode(message)
        if len(encoded) <= MAX_MESSAGE_BYTES or not isinstance(message, Outputs):
            return [encoded]
        outputs, half = message.outputs, len(message.outputs) // 2
        if not half:
            return [encoded]
        parts = (Outputs(outputs[:half]), Outputs(outputs[half:]))
        return [each for part in parts for each in self.encode_parts(part)]


def _decoder(message_type: Any) -> Callable[[bytes], Any]:
    """A function that decodes bytes to a message, or logs a warning and returns `None`."""
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

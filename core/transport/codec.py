"""Messages as bytes, and back.

Owns the encoding (MessagePack), its bound, and what becomes of a message that does not decode: it
is logged and dropped. The modality types inside are the composition root's to name.
"""

from __future__ import annotations

import logging
from typing import Any, Generic, TypeVar

import msgspec

from triptych.core.transport.messages import FromEngine, ToEngine

MAX_MESSAGE_BYTES = 64 * 2**20
"""A message above this is dropped; the largest prompt a request may bring is far below."""

Message = TypeVar("Message")
_log = logging.getLogger(__name__)


class TypedDecoder(Generic[Message]):
    """Decodes one direction of the line."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def __call__(self, data: bytes) -> Message | None:
        """The message in `data`, or `None` (and a line in the log) where there is none."""
        if len(data) > MAX_MESSAGE_BYTES:
            _log.warning("dropped a message of %d bytes", len(data))
            return None
        try:
            message: Message = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # The reason names fields and types, never content.
            _log.warning("dropped a malformed message: %s", type(error).__name__)
            return None
        return message


class MessageCodec:
    """Both directions. `request` and `payload` are tagged unions of the modalities' types.

    `codec.to_engine(codec.encode(Submit(...)))` is the message again.
    """

    def __init__(self, *, request: Any, payload: Any) -> None:
        inbound: Any = ToEngine
        outbound: Any = FromEngine
        self.encode = msgspec.msgpack.Encoder().encode
        self.to_engine: TypedDecoder[ToEngine] = TypedDecoder(inbound[request])
        self.from_engine: TypedDecoder[FromEngine] = TypedDecoder(outbound[payload])

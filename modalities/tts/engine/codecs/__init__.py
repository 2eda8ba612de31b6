"""Streaming codec decoders. `build_decoder` turns a codec model into a `CodecDecoder`."""

from triptych.modalities.tts.engine.codecs.decoder import StreamingDecoder
from triptych.modalities.tts.engine.codecs.protocol import CodecDecoder, CodecKind, DecodedAudio
from triptych.modalities.tts.engine.codecs.registry import adapter_for, build_decoder
from triptych.modalities.tts.engine.codecs.sentence import SentenceDecoder

__all__ = [
    "CodecDecoder",
    "CodecKind",
    "DecodedAudio",
    "SentenceDecoder",
    "StreamingDecoder",
    "adapter_for",
    "build_decoder",
]

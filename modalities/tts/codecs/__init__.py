"""Streaming codec decoders. `build_decoder` turns a codec model into a `CodecDecoder`."""

from triptych.modalities.tts.codecs.decoder import StreamingDecoder
from triptych.modalities.tts.codecs.protocol import CodecDecoder, CodecKind, DecodedAudio
from triptych.modalities.tts.codecs.registry import adapter_for, build_decoder
from triptych.modalities.tts.codecs.sentence import SentenceDecoder

__all__ = [
    "CodecDecoder",
    "CodecKind",
    "DecodedAudio",
    "SentenceDecoder",
    "StreamingDecoder",
    "adapter_for",
    "build_decoder",
]

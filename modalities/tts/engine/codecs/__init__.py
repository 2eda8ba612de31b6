"""Streaming codec decoders. `build_decoder` turns a codec model into a `CodecDecoder`."""

from triptych.modalities.tts.engine.codecs.decoder import StreamingDecoder
from triptych.modalities.tts.engine.codecs.loading import adapter_for, build_decoder
from triptych.modalities.tts.engine.codecs.protocol import CodecDecoder, DecodedAudio

__all__ = [
    "CodecDecoder",
    "DecodedAudio",
    "StreamingDecoder",
    "adapter_for",
    "build_decoder",
]

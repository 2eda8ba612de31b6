"""A plot of a chunk boundary: speech decoded with state, and in windows of frames.

    python samples/benchmarks/speech_seam.py --output docs/benchmarks

The embedded voice says a sentence. Its codes are then decoded three times: at once, in chunks by
the streaming decoder, and in windows of a chunk and the frames before it, as a stateless server
does. Prints the largest difference of both from decoding at once, and plots it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from triptych import SpeechPipeline
from triptych.modalities.tts.engine.codecs.decoder import StreamingDecoder, stream_row
from triptych.modalities.tts.engine.codecs.window import OneShotCodec, WindowDecoder, WindowPolicy
from triptych.modalities.tts.engine.models.voice import blueprint
from triptych.modalities.tts.engine.models.voice.codec import VoiceCodec, adapter, voice_decoder

TEXT = "The harbour was quiet that morning, and nobody spoke of the storm."
CHUNK = 5
CONTEXT = 5
SHOWN_S = (0.5, 1.7)


class Recorder(StreamingDecoder):
    """A decoder that records its input."""

    def __init__(self, model: VoiceCodec, *, num_rows: int) -> None:
        self.codes: list[Tensor] = []
        super().__init__(adapter(model), num_rows=num_rows)

    def push(self, codes_BQF: Tensor, rows, num_valid=None):  # type: ignore[no-untyped-def]
        """Record the codes; one row speaks at a time."""
        self.codes.append(codes_BQF[:1, :, : num_valid[0] if num_valid else None].clone())
        return super().push(codes_BQF, rows, num_valid)


def speak() -> tuple[VoiceCodec, Tensor]:
    """The voice's codec, and the codes of the sentence."""
    models: list[VoiceCodec] = []
    recorders: list[Recorder] = []

    def record(model: VoiceCodec, *, num_rows: int) -> Recorder:
        models.append(model)
        recorders.append(Recorder(model, num_rows=num_rows))
        return recorders[-1]

    with (
        mock.patch.object(blueprint, "voice_decoder", record),
        SpeechPipeline.from_pretrained("triptych-voice", progress=False) as voice,
    ):
        recorders[-1].codes.clear()
        voice(TEXT)
    return models[-1], torch.cat(recorders[-1].codes, -1)


def windowed(model: VoiceCodec, codes_1QF: Tensor) -> Tensor:
    """Audio of chunks decoded in windows, each cut to its own frames."""
    voice = adapter(model)
    codec = OneShotCodec(
        decode=voice.one_shot,
        num_codebooks=voice.num_codebooks,
        sample_rate=voice.sample_rate,
        hop=model.config.frames_per_step * model.config.hop,
    )
    decoder = WindowDecoder(codec, WindowPolicy(buffer=CONTEXT), num_rows=1)
    decoder.init_state([0])
    audio = [decoder.push(part, [0]).row(0) for part in codes_1QF.split(CHUNK, -1)]
    return torch.cat([*audio, decoder.flush([0]).row(0)])


def plot(
    path: Path, whole_S: np.ndarray, ours_S: np.ndarray, theirs_S: np.ndarray, hop: int
) -> None:
    """Waveforms around the worst boundary above, spectrograms below."""
    rate = 24_000
    seams = range(CHUNK * hop, len(whole_S), CHUNK * hop)
    worst = max(seams, key=lambda at: np.abs(theirs_S - whole_S)[at - 240 : at + 240].max())
    near = slice(worst - 480, worst + 480)
    figure = Figure(figsize=(11, 7), layout="constrained")
    top, left, right = figure.subplot_mosaic([["wave", "wave"], ["ours", "theirs"]]).values()
    time_ms = (np.arange(near.start, near.stop) - worst) / rate * 1e3
    top.plot(time_ms, whole_S[near], color="0.75", linewidth=5, label="decoded at once")
    top.plot(time_ms, theirs_S[near], color="tab:red", label=f"windows: {CONTEXT} frames before")
    top.plot(time_ms, ours_S[near], color="tab:blue", linewidth=1.2, label="streamed with state")
    top.axvline(0, color="0.5", linestyle=":")
    top.set(title="Boundary of two chunks", xlabel="ms", ylabel="amplitude")
    top.legend(loc="lower right", framealpha=1)
    shown = slice(*(int(at * rate) for at in SHOWN_S))
    for axes, pcm_S, title in ((left, ours_S, "streamed"), (right, theirs_S, "in windows")):
        axes.specgram(pcm_S[shown] + 1e-6, NFFT=512, Fs=rate, noverlap=448, vmin=-130, vmax=-50)
        axes.set(title=f"Spectrum, {title}", xlabel="s", ylabel="Hz", ylim=(0, 8000))
        for at in seams:
            if shown.start < at < shown.stop:
                axes.plot((at - shown.start) / rate, 7800, "v", color="white")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Decode, compare, plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder of speech_seam.png")
    args = parser.parse_args()
    model, codes_1QF = speak()
    with torch.inference_mode():
        whole_S = adapter(model).one_shot(codes_1QF)[0]
        theirs_S = windowed(model, codes_1QF)
    decoder = voice_decoder(model, num_rows=1)
    num_chunks = codes_1QF.shape[-1] // CHUNK
    ours_S = stream_row(decoder, codes_1QF, [CHUNK] * num_chunks)
    for name, pcm_S in (("streamed", ours_S), ("in windows", theirs_S)):
        error = float((pcm_S - whole_S).abs().max() / whole_S.abs().max())
        print(f"{name}: largest difference from decoding at once {error:.1e} of the loudest sample")
    sounds = (whole_S.numpy(), ours_S.numpy(), theirs_S.numpy())
    plot(args.output / "speech_seam.png", *sounds, hop=decoder.hop)


if __name__ == "__main__":
    main()

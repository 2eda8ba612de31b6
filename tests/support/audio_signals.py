"""Signals to encode, and decoders to hear them with."""

from __future__ import annotations

import io
import wave

import av
import numpy as np

from triptych.core.media.audio.resampling import Pcm

DEMUXERS = {"opus": "ogg"}


def sweep(num_samples: int, sample_rate: int) -> Pcm:
    """A sine from 120 Hz to 3 kHz."""
    t_S = np.arange(num_samples) / sample_rate
    duration_s = max(num_samples / sample_rate, 1e-9)
    phase_S = 120 * t_S + 2880 * t_S**2 / (2 * duration_s)
    return (0.6 * np.sin(2 * np.pi * phase_S)).astype(np.float32)


def babble(num_samples: int, sample_rate: int) -> Pcm:
    """Noise with the long-term spectrum and the four syllables a second of speech."""
    spectrum = np.fft.rfft(np.random.default_rng(3).standard_normal(num_samples))
    frequency = np.fft.rfftfreq(num_samples, 1 / sample_rate)
    shape = (frequency > 90) / (1 + (frequency / 500) ** 2) * (frequency < 3400)
    noise_S = np.fft.irfft(spectrum * shape, num_samples)
    envelope_S = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * np.arange(num_samples) / sample_rate)
    return (0.8 * envelope_S * noise_S / np.abs(noise_S).max()).astype(np.float32)


def decode_av(data: bytes, kind: str) -> tuple[np.ndarray, int]:
    """Samples [S] and rate by FFmpeg; one stream, and nothing in it that does not decode."""
    with av.open(io.BytesIO(data), "r", format=DEMUXERS.get(kind, kind)) as container:
        assert len(container.streams) == 1
        frames = list(container.decode(audio=0))
        rate = container.streams.audio[0].rate
    parts = [frame.to_ndarray()[0] for frame in frames]
    pcm_S = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return pcm_S / (32768 if pcm_S.dtype == np.int16 else 1), rate


def decode_soundfile(data: bytes) -> tuple[np.ndarray, int]:
    """Samples [S] and rate by libsndfile, in blocks, as the length may be unknown."""
    import soundfile

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        blocks = []
        while len(block := file.read(4096, dtype="float64")):
            blocks.append(block)
        return np.concatenate([np.zeros(0), *blocks]), file.samplerate


def wav_bytes(samples: np.ndarray, sample_rate: int) -> bytes:
    """16-bit samples [S, channels] as a WAV file of the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()

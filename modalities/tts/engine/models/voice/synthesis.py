"""Sound from spectral frames: pulses at the pitch, filtered, plus a residual; one inverse FFT.

Owns the synthesis, at once and as a streaming stage. A frame's spectrum is the short-time spectrum
of a band-limited pulse train times the harmonic filter, plus the residual, whose phase is the
codec's in voiced frames and noise elsewhere. Noise is a hash of the row's seed, the frame and the
bin.

The window around a frame's start extends one frame beyond that frame, and overlap-add delays half a
window: output trails by three frames in total, with a window of four.

Shapes: B rows, T frames, S samples, H samples of a frame (a hop), N samples of a window, K bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triptych.modalities.tts.configs.voice import CodecConfig
from triptych.modalities.tts.engine.codecs.families.snac import keyed_normal
from triptych.modalities.tts.engine.codecs.layers import OverlapTail
from triptych.modalities.tts.engine.codecs.stages import (
    CodecStep,
    Delay,
    SignalRate,
    SlotState,
    StreamingStage,
)

_MAX_HARMONIC_HZ = 11_000.0
_MAX_LOG = 7.0
_SMALL_SINE = 2e-3
_OVERLAP_GAIN = 1.5  # the sum of squared Hann windows a quarter apart
_PITCH_SCALE, _PITCH_CENTRE_HZ = 4.0, 200.0


@dataclass(frozen=True, slots=True)
class Spectra:
    """The spectrum of frames: `exp(harmonic + i phase)` filters the pulses, the residual is added.

    All [B, K, T] except pitch and voicing, [B, T]. `harmonic` and `residual` are log magnitudes,
    phases are in radians, `pitch` is the log2 of Hz at the end of each frame. Frames are voiced
    where `voicing` is positive; elsewhere there are no pulses, and the residual's phase is noise.
    """

    harmonic: Tensor
    harmonic_phase: Tensor
    residual: Tensor
    residual_phase: Tensor
    pitch: Tensor
    voicing: Tensor


def spectra_of(raw_BCT: Tensor) -> Spectra:
    """Split the codec's raw channels [B, 4 K + 2, T] and convert their units."""
    harmonic, phase, residual, residual_phase = raw_BCT[:, :-2].chunk(4, 1)
    return Spectra(
        harmonic=harmonic,
        harmonic_phase=math.pi * phase.tanh(),
        residual=residual,
        residual_phase=residual_phase,
        pitch=raw_BCT[:, -2] / _PITCH_SCALE + math.log2(_PITCH_CENTRE_HZ),
        voicing=raw_BCT[:, -1],
    )


@dataclass(frozen=True, slots=True)
class Excitation:
    """Pulses [B, T * H], and each frame's final (phase in cycles, pitch in Hz), [B, 2, T]."""

    wave: Tensor
    ends: Tensor


def excite(spectra: Spectra, before_B2: Tensor, config: CodecConfig) -> Excitation:
    """A pulse train at the pitch, continuing from the previous frame's state; float64 phases.

    Within a voiced frame the frequency changes linearly from the previous frame's (if voiced) to
    its own. Every harmonic below 11 kHz has unit amplitude: the sum over h <= H of cos(h t) is
    sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2. Phase is kept modulo one cycle.
    """
    hop = config.hop
    is_voiced_BT = spectra.voicing > 0
    to_BT = spectra.pitch.double().exp2() * is_voiced_BT
    from_BT = torch.cat((before_B2[:, 1:], to_BT[:, :-1]), 1)
    from_BT = torch.where(from_BT > 0, from_BT, to_BT) * is_voiced_BT
    at_H = torch.arange(1, hop + 1, device=to_BT.device, dtype=torch.float64)
    slope_BT1 = ((to_BT - from_BT) / hop)[..., None]
    hz_BTH = from_BT[..., None] + slope_BT1 * at_H
    cycles_BTH = from_BT[..., None] * at_H + slope_BT1 * at_H * (at_H + 1) / 2
    cycles_BTH = cycles_BTH / config.sample_rate
    ends_BT = before_B2[:, :1] + cycles_BTH[..., -1].cumsum(1)
    starts_BT = torch.cat((before_B2[:, :1], ends_BT[:, :-1]), 1)
    angle_BTH = ((starts_BT[..., None] + cycles_BTH) % 1).float() * (2 * math.pi)
    wave_BTH = _pulse(angle_BTH, hz_BTH.float()) * is_voiced_BT[..., None]
    return Excitation(wave_BTH.flatten(1), torch.stack((ends_BT % 1, to_BT), 1))


def _pulse(angle: Tensor, hz: Tensor) -> Tensor:
    order = (_MAX_HARMONIC_HZ / hz.clamp(min=1)).floor() + 0.5
    sine = (angle / 2).sin()
    is_limit = sine.abs() <= _SMALL_SINE
    ratio = (order * angle).sin() / (2 * sine.where(~is_limit, 1))
    return torch.where(is_limit, order, ratio) - 0.5


class FrameSynthesis:
    """Maps windows of pulses to windows of sound, frame by frame."""

    def __init__(self, config: CodecConfig) -> None:
        self.config = config

    def __call__(
        self, raw_BCT: Tensor, windows_BTN: Tensor, seeds_B: Tensor, times_BT: Tensor
    ) -> Tensor:
        """Windowed frames of sound [B, N, T]; the frames' times key the noise."""
        spectra = spectra_of(raw_BCT)
        size = self.config.n_fft
        window_N = torch.hann_window(size, device=raw_BCT.device)
        # A cosine of unit amplitude peaks at half the window's sum, a quarter of its length.
        pulses_BTK = torch.fft.rfft(windows_BTN * window_N) * (4 / size)
        gain = spectra.harmonic.float().clamp(max=_MAX_LOG).exp()
        filter_BKT = torch.polar(gain, spectra.harmonic_phase.float())
        total_BTK = pulses_BTK * filter_BKT.transpose(1, 2)
        total_BTK = total_BTK + self._residual(spectra, seeds_B, times_BT).transpose(1, 2)
        frames_BTN: Tensor = torch.fft.irfft(total_BTK, size) * (window_N / _OVERLAP_GAIN)
        return frames_BTN.transpose(1, 2)

    def _residual(self, spectra: Spectra, seeds_B: Tensor, times_BT: Tensor) -> Tensor:
        bins_K1 = torch.arange(self.config.num_bins, device=times_BT.device)[:, None]
        size = spectra.residual.float().clamp(max=_MAX_LOG).exp()
        keys = (seeds_B[:, None, None], times_BT[:, None])
        noise = torch.complex(
            *(keyed_normal(keys[0], 2 * bins_K1 + part, keys[1]) for part in (0, 1))
        )
        phased = torch.polar(torch.ones_like(size), spectra.residual_phase.float())
        residual: Tensor = size * torch.where(spectra.voicing[:, None] > 0, phased, noise)
        return residual


def synthesize(raw_BCT: Tensor, seeds_B: Tensor, config: CodecConfig) -> Tensor:
    """Sound [B, T * H] of whole streams."""
    spectra = spectra_of(raw_BCT)
    before_B2 = torch.zeros(len(raw_BCT), 2, dtype=torch.float64, device=raw_BCT.device)
    wave_BS = excite(spectra, before_B2, config).wave
    half, hop = config.n_fft // 2, config.hop
    windows_BTN = functional.pad(wave_BS, (half, half - hop)).unfold(1, config.n_fft, hop)
    num_frames = raw_BCT.shape[-1]
    times_BT = torch.arange(num_frames, device=raw_BCT.device).expand(len(raw_BCT), -1)
    frames_BNT = FrameSynthesis(config)(raw_BCT, windows_BTN, seeds_B, times_BT)
    pcm_BS = _overlap_add(frames_BNT, config)[:, 0]
    return pcm_BS[:, half : half + num_frames * hop]


def _overlap_add(frames_BNT: Tensor, config: CodecConfig) -> Tensor:
    length = (frames_BNT.shape[-1] - 1) * config.hop + config.n_fft
    full = functional.fold(frames_BNT, (1, length), (1, config.n_fft), stride=(1, config.hop))
    return full[:, :, 0]


class StreamingFrames(StreamingStage):
    """Maps raw channels to windowed frames of sound, as soon as a frame's window is full."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.lag = config.n_fft // 2 // config.hop - 1
        self.num_past = config.n_fft - config.hop
        self.synthesis = FrameSynthesis(config)
        self.delay = Delay(self.lag)
        self.ends, self.wave = SlotState(), SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Frames wait for the pulses of the following frames."""
        self.signal = signal
        self.end = self.delay.bind(signal)
        return self.end

    def forward(self, raw_BCT: Tensor, step: CodecStep) -> Tensor:
        """Windows that end with the new frames; at the end, windows that extend into silence."""
        wave_B1S = self._excite(raw_BCT, step)
        past_B1L = step.read(self.wave, (1, self.num_past), wave_B1S)
        buffer = torch.cat((past_B1L, wave_B1S), -1)
        step.keep(self.wave, buffer, self.num_past, self.signal.rate * self.config.hop)
        if step.is_flush:
            buffer = functional.pad(buffer, (0, self.lag * self.config.hop))
        windows_BTN = buffer[:, 0].unfold(1, self.config.n_fft, self.config.hop)
        raw_BCT = self.delay(raw_BCT, step)
        times_BT = step.times(self.end, raw_BCT.shape[-1])
        return self.synthesis(raw_BCT, windows_BTN, step.seeds_B, times_BT)

    def _excite(self, raw_BCT: Tensor, step: CodecStep) -> Tensor:
        double = raw_BCT.new_empty(0, dtype=torch.float64)
        before_B21 = step.read(self.ends, (2, 1), double)
        if not raw_BCT.shape[-1]:
            return raw_BCT.new_empty(len(raw_BCT), 1, 0, dtype=torch.float32)
        excitation = excite(spectra_of(raw_BCT), before_B21[..., 0], self.config)
        step.keep(self.ends, torch.cat((before_B21, excitation.ends), -1), 1, self.signal.rate)
        return excitation.wave[:, None]


class FrameOverlapAdd(OverlapTail):
    """Overlap-add of the frames; a whole stream has one hop of sound per frame."""

    def __init__(self, config: CodecConfig) -> None:
        half = config.n_fft // 2
        super().__init__(config.hop, config.n_fft, (half, half - config.hop))
        self.config = config

    def spread(self, x_BCT: Tensor) -> Tensor:
        """The sums of these frames alone."""
        return _overlap_add(x_BCT, self.config)

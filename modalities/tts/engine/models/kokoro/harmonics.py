"""The voice before the mouth: harmonics of the pitch where it is voiced, noise where it is not.

Owns the harmonic-plus-noise source of neural source-filter models (arXiv:1904.12088), and the
noise itself, which depends on a sentence's seed alone.

Legend: P pitch values, S samples, H sinusoids (the fundamental and its overtones).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.modalities.tts.configs.kokoro import NUM_HARMONICS, SAMPLE_RATE

VOICED_ABOVE_HZ = 10.0
SINE_AMPLITUDE = 0.1
VOICED_NOISE = 0.003
NUM_SINUSOIDS = NUM_HARMONICS + 1


class HarmonicSource(nn.Module):
    """Sinusoids at multiples of the pitch, and noise, merged into one signal."""

    def __init__(self, samples_per_pitch: int) -> None:
        super().__init__()
        self.samples_per_pitch = samples_per_pitch
        self.l_linear = nn.Linear(NUM_SINUSOIDS, 1)

    def forward(self, pitch_P: Tensor, noise_SH: Tensor) -> Tensor:
        """[S] from pitch in hertz (0 or less where unvoiced) and standard normal noise."""
        voiced_P1 = (pitch_P > VOICED_ABOVE_HZ)[:, None]
        voiced_S1 = voiced_P1.repeat_interleave(self.samples_per_pitch, dim=0)
        noise_SH = torch.where(voiced_S1, VOICED_NOISE, SINE_AMPLITUDE / 3) * noise_SH
        sines_SH = SINE_AMPLITUDE * torch.sin(2 * torch.pi * self._cycles(pitch_P))
        return torch.tanh(self.l_linear(sines_SH * voiced_S1 + noise_SH))[:, 0]

    def _cycles(self, pitch_P: Tensor) -> Tensor:
        """Phases [S, H] in cycles: linear between the middles of pitch values, held outside.

        Whole cycles are dropped in float64 once per pitch value, so that phases stay exact however
        long the sentence: float32 would lose a hundredth of a radian after a few seconds.
        """
        size, device, dtype = self.samples_per_pitch, pitch_P.device, pitch_P.dtype
        overtones_H = torch.arange(1, NUM_SINUSOIDS + 1, device=device)
        step_PH = pitch_P[:, None].double() * overtones_H / SAMPLE_RATE % 1 * size
        cycles_PH = step_PH.cumsum(0) % 1
        held_1H = torch.zeros_like(step_PH[:1])
        start_QH = torch.cat((cycles_PH[:1], cycles_PH)).to(dtype)  # one piece more than values
        slope_QH = torch.cat((held_1H, step_PH[1:], held_1H)).to(dtype)
        ramp_Z1 = (torch.arange(size, device=device, dtype=dtype)[:, None] + 0.5) / size
        phase_QZH = start_QH[:, None] + ramp_Z1 * slope_QH[:, None]
        return phase_QZH.flatten(0, 1)[size // 2 : size // 2 + len(pitch_P) * size]


def source_noise(seed: int, num_samples: int) -> Tensor:
    """Standard normal noise [S, H]: for one seed the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, NUM_SINUSOIDS, generator=generator)

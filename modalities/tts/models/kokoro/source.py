"""The voice before the mouth: harmonics of the pitch where it is voiced, noise where it is not.

Owns the harmonic-plus-noise source of neural source-filter models (arXiv:1904.12088), and the
noise itself, which depends on a row's seed alone.

Legend: B rows, P pitch values, S samples, H sinusoids (the fundamental and its overtones).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.modalities.tts.models.kokoro.config import NUM_HARMONICS, SAMPLE_RATE
from triptych.modalities.tts.models.kokoro.extent import Extent

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

    def forward(self, pitch_BP: Tensor, noise_BSH: Tensor, extent: Extent) -> Tensor:
        """[B, S] from pitch in hertz (0 or less where unvoiced) and standard normal noise."""
        pitch_BP = extent.clear(pitch_BP[:, None])[:, 0]
        voiced_BP1 = (pitch_BP > VOICED_ABOVE_HZ)[..., None]
        voiced_BS1 = voiced_BP1.repeat_interleave(self.samples_per_pitch, dim=1)
        noise_BSH = torch.where(voiced_BS1, VOICED_NOISE, SINE_AMPLITUDE / 3) * noise_BSH
        sines_BSH = SINE_AMPLITUDE * torch.sin(2 * torch.pi * self._cycles(pitch_BP))
        merged_BS1 = self.l_linear(sines_BSH * voiced_BS1 + noise_BSH)
        return torch.tanh(merged_BS1)[..., 0]

    def _cycles(self, pitch_BP: Tensor) -> Tensor:
        """Phases [B, S, H] in cycles: linear between the middles of pitch values, held outside.

        Whole cycles are dropped in float64 once per pitch value, so that phases stay exact however
        long the sentence: float32 would lose a hundredth of a radian after a few seconds. Cleared
        padding adds nothing, which holds the phase behind each row's own last value.
        """
        size = self.samples_per_pitch
        overtones_H = torch.arange(1, NUM_SINUSOIDS + 1, device=pitch_BP.device)
        step_BPH = pitch_BP[..., None].double() * overtones_H / SAMPLE_RATE % 1 * size
        cycles_BPH = step_BPH.cumsum(1) % 1
        start_BPH = torch.cat((cycles_BPH[:, :1], cycles_BPH), 1).to(pitch_BP.dtype)
        first_BPH = torch.zeros_like(step_BPH[:, :1])
        slope_BPH = torch.cat((first_BPH, step_BPH[:, 1:], first_BPH), 1).to(pitch_BP.dtype)
        ramp_Z1 = (torch.arange(size, device=pitch_BP.device, dtype=pitch_BP.dtype) + 0.5) / size
        phase_BPZH = start_BPH[:, :, None] + ramp_Z1[:, None] * slope_BPH[:, :, None]
        half = size // 2
        return phase_BPZH.flatten(1, 2)[:, half : half + pitch_BP.shape[1] * size]


def source_noise(seed: int, num_samples: int) -> Tensor:
    """Standard normal noise [S, H] of one row: the same for a seed on every device and batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, NUM_SINUSOIDS, generator=generator)

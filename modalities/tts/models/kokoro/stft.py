"""A short-time Fourier transform and its inverse, over rows of different lengths.

Owns framing, windowing and overlap-adding exactly as `torch.stft` and `torch.istft` do for each
row alone: centred frames, reflected at the row's own ends.

Legend: B rows, S samples, T frames, K frequencies, N window length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from triptych.modalities.tts.models.kokoro.extent import Extent

SMALLEST_ENVELOPE = 1e-11


@dataclass(frozen=True, slots=True)
class Stft:
    """A transform of `n_fft` points every `hop` samples under a periodic Hann window."""

    n_fft: int
    hop: int

    def analyse(self, signal_BS: Tensor, extent: Extent) -> Tensor:
        """Magnitudes and then phases of `extent` (in samples), [B, 2K, S / hop + 1]."""
        padded_BS = _reflect(signal_BS, extent, self.n_fft // 2)
        frames_BTN = padded_BS.unfold(-1, self.n_fft, self.hop) * self._window(signal_BS)
        spectrum_BTK = torch.fft.rfft(frames_BTN)
        return torch.cat((spectrum_BTK.abs(), spectrum_BTK.angle()), dim=-1).transpose(1, 2)

    def synthesise(self, magnitude_BKT: Tensor, phase_BKT: Tensor, extent: Extent) -> Tensor:
        """The signal [B, hop * (T - 1)] of frames within `extent`; silence behind each row."""
        window_N1 = self._window(magnitude_BKT)[:, None]
        spectrum_BKT = torch.polar(magnitude_BKT, phase_BKT)
        frames_BNT = torch.fft.irfft(spectrum_BKT, n=self.n_fft, dim=1) * window_N1
        weights_BNT = extent.clear((window_N1**2).expand_as(frames_BNT))
        signal_BS, envelope_BS = (
            self._overlap_add(x) for x in (extent.clear(frames_BNT), weights_BNT)
        )
        return signal_BS / envelope_BS.clamp(min=SMALLEST_ENVELOPE)

    def _overlap_add(self, frames_BNT: Tensor) -> Tensor:
        length = self.n_fft + self.hop * (frames_BNT.shape[-1] - 1)
        summed = F.fold(frames_BNT, (1, length), (1, self.n_fft), stride=(1, self.hop))
        edge = self.n_fft // 2
        return summed[:, 0, 0, edge : length - edge]

    def _window(self, like: Tensor) -> Tensor:
        return torch.hann_window(self.n_fft, dtype=like.dtype, device=like.device)


def _reflect(signal_BS: Tensor, extent: Extent, edge: int) -> Tensor:
    """Each row with `edge` samples more on both sides, mirrored at its own first and last one."""
    last_B1 = torch.tensor(extent.lengths, device=signal_BS.device)[:, None] - 1
    position_S = torch.arange(-edge, signal_BS.shape[-1] + edge, device=signal_BS.device)
    mirrored_BS = last_B1 - (last_B1 - position_S.abs()).abs()
    return signal_BS.gather(1, mirrored_BS.clamp(min=0))

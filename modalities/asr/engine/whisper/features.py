"""Log-mel spectrograms for Whisper, computed in pieces.

Owns the short-time Fourier transform over pieces of the audio and joining them. Filters and all
constants are those of transformers' `WhisperFeatureExtractor`; the result is equal. Shape suffixes:
S samples, F frames, M mel bins.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.asr.spec import HOP_SAMPLES, SAMPLE_RATE, WhisperSpec

_DYNAMIC_RANGE = 8.0
_FLOOR = 1e-10


class LogMel:
    """The transform of one model, on its device."""

    def __init__(self, spec: WhisperSpec, device: torch.device) -> None:
        extractor = WhisperFeatureExtractor(feature_size=spec.config.num_mel_bins)
        assert (extractor.hop_length, extractor.sampling_rate) == (HOP_SAMPLES, SAMPLE_RATE)
        self.window_frames, self.device = spec.window_frames, device
        self._size = extractor.n_fft
        self._window_S = torch.hann_window(self._size, device=device)
        filters = torch.from_numpy(extractor.mel_filters).to(device, torch.float32)
        self._filters_MB = filters.T.contiguous()

    def decades(self, pcm_S: Tensor, start: int, num_frames: int) -> Tensor:
        """Base-10 logarithms of mel powers [M, num_frames] from frame `start` on.

        Frames are centred on their time; the audio is mirrored at its ends.
        """
        margin = self._size // 2
        low, high = start * HOP_SAMPLES - margin, (start + num_frames - 1) * HOP_SAMPLES + margin
        piece_S = pcm_S[max(low, 0) : high]
        left, right = max(-low, 0), max(high - len(pcm_S), 0)
        if left or right:
            piece_S = torch.nn.functional.pad(piece_S[None], (left, right), mode="reflect")[0]
        spectrum_BF = torch.stft(
            piece_S,
            self._size,
            HOP_SAMPLES,
            window=self._window_S,
            center=False,
            return_complex=True,
        )
        mel_MF = self._filters_MB @ (spectrum_BF.abs() ** 2).contiguous()
        return mel_MF.clamp(min=_FLOOR).log10()


class Spectrogram:
    """The spectrogram of one recording: computed in order, then read window by window.

    Audio shorter than a window is padded with silence; the last window of longer audio is padded
    with zeros, as in transformers.
    """

    def __init__(self, mel: LogMel, pcm_S: Tensor) -> None:
        self.num_frames = len(pcm_S) // HOP_SAMPLES
        missing = mel.window_frames * HOP_SAMPLES - len(pcm_S)
        self._pcm_S = torch.nn.functional.pad(to_device(pcm_S, mel.device), (0, max(missing, 0)))
        self._mel = mel
        self._pieces: list[Tensor] = []
        self._num_left = len(self._pcm_S) // HOP_SAMPLES
        self._num_made = 0
        self._peak: Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Whether the whole spectrogram has been computed."""
        return self._num_left == 0

    def make(self) -> None:
        """Compute the frames of another window."""
        num_frames = min(self._mel.window_frames, self._num_left)
        piece_MF = self._mel.decades(self._pcm_S, self._num_made, num_frames)
        self._pieces.append(piece_MF)
        peak = piece_MF.max()
        self._peak = peak if self._peak is None else torch.maximum(self._peak, peak)
        self._num_made += num_frames
        self._num_left -= num_frames
        if self.is_made:
            self._pieces = [torch.cat(self._pieces, 1)]
            self._pcm_S = self._pcm_S[:0]

    def window(self, start: int) -> Tensor:
        """The encoder's input [M, window] from frame `start` on."""
        assert self.is_made
        assert self._peak is not None
        decades_MF = self._pieces[0][:, start : start + self._mel.window_frames]
        bounded_MF = (decades_MF.clamp(min=self._peak - _DYNAMIC_RANGE) + 4.0) / 4.0
        missing = self._mel.window_frames - bounded_MF.shape[1]
        return torch.nn.functional.pad(bounded_MF, (0, missing))

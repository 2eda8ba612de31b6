"""The voice of a recording as a vector: Qwen3-TTS's ECAPA-TDNN, and the table of known vectors.

Owns the encoder (Desplanques et al., 2020) with the names of the published checkpoints, the mel
spectrogram that it reads, and the numbers by which prompts name recorded speakers. Knows no
decoder.

Shapes: B recordings, S samples, T frames, M mels, C channels.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.configs.qwen3_tts import NUMBER_BITS

SAMPLE_RATE = 24_000
_FFT, _HOP = 1024, 256
_HIGHEST_HZ = 12_000.0
_MAX_SPEAKERS = 4096  # some 16 MB on the host


class SpeakerFields(msgspec.Struct, frozen=True, kw_only=True):
    """`speaker_encoder_config` of config.json."""

    mel_dim: int = 128
    enc_dim: int = 1024
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128


def vector_bytes(fields: SpeakerFields, num_samples: int) -> int:
    """Peak memory of `SpeakerEncoder.vector`: its widest values, as measured 8.5 times."""
    return 4 * 9 * max(fields.enc_channels) * (num_samples // _HOP)


class RecordedSpeakers:
    """Vectors of recorded speakers, on the host, by number. Thread-safe.

    A number is a hash of the recording's digest, the same in every process: prompts with it may
    share pages, also stored ones. The least recently used of very many vectors is dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._vectors: OrderedDict[int, tuple[str, Tensor]] = OrderedDict()

    def add(self, digest: str, vector_C: Tensor) -> int:
        """The number of a recording with this `digest`. Raises `InvalidRequest` where two agree."""
        hashed = hashlib.blake2b(digest.encode(), digest_size=8).digest()
        number = int.from_bytes(hashed, "little") >> (64 - NUMBER_BITS)
        with self._lock:
            known, _ = self._vectors.setdefault(number, (digest, vector_C))
            if known != digest:
                raise InvalidRequest("Make this voice again: its number is taken.", param="voice")
            self._vectors.move_to_end(number)
            if len(self._vectors) > _MAX_SPEAKERS:
                self._vectors.popitem(last=False)
            return number

    def vector(self, number: int) -> Tensor:
        """The vector of a number. Raises `InvalidRequest` if it was dropped."""
        with self._lock:
            if number not in self._vectors:
                raise InvalidRequest(
                    "Too many voices were used at once: send this request again.", param="voice"
                )
            return self._vectors[number][1]


def mel_spectrogram(pcm_S: Tensor, num_mels: int) -> Tensor:
    """The logarithm of the mel spectrogram at 24 kHz, `[T, M]`."""
    from torchaudio.functional import melscale_fbanks  # slow to import, and rarely needed

    padding = (_FFT - _HOP) // 2
    padded_S = functional.pad(pcm_S[None, None], (padding, padding), mode="reflect")[0, 0]
    window = torch.hann_window(_FFT, device=pcm_S.device)
    spectrum = torch.stft(padded_S, _FFT, _HOP, window=window, center=False, return_complex=True)
    magnitude = (torch.view_as_real(spectrum).pow(2).sum(-1) + 1e-9).sqrt()
    filters = melscale_fbanks(
        _FFT // 2 + 1, 0.0, _HIGHEST_HZ, num_mels, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
    )
    mels_TM: Tensor = magnitude.T @ filters.to(magnitude)
    return mels_TM.clamp(min=1e-5).log()


class SpeakerEncoder(nn.Module):
    """Maps mel spectrograms to vectors; `load_state_dict` takes the published names."""

    def __init__(self, fields: SpeakerFields) -> None:
        super().__init__()
        self.fields = fields
        channels, kernels, dilations = (
            fields.enc_channels,
            fields.enc_kernel_sizes,
            fields.enc_dilations,
        )
        first = _Tdnn(fields.mel_dim, channels[0], kernels[0], dilations[0])
        blocks = [_Block(fields, index) for index in range(1, len(channels) - 1)]
        self.blocks = nn.ModuleList((first, *blocks))
        self.mfa = _Tdnn(channels[-1], channels[-1], kernels[-1], dilations[-1])
        self.asp = _Pooling(channels[-1], fields.enc_attention_channels)
        self.fc = _conv(2 * channels[-1], fields.enc_dim)

    def forward(self, mels_BTM: Tensor) -> Tensor:
        """`vector_BC` of whole spectrograms."""
        x_BCT, outputs = mels_BTM.transpose(1, 2), []
        for block in self.blocks:
            x_BCT = block(x_BCT)
            outputs.append(x_BCT)
        pooled_BC1: Tensor = self.fc(self.asp(self.mfa(torch.cat(outputs[1:], 1))))
        return pooled_BC1[..., 0]

    def vector(self, pcm_S: Tensor) -> Tensor:
        """The voice of a recording at 24 kHz: `vector_C`."""
        vector_1C: Tensor = self(mel_spectrogram(pcm_S.float(), self.fields.mel_dim)[None])
        return vector_1C[0]


def _conv(num_in: int, num_out: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(
        num_in, num_out, kernel, dilation=dilation, padding="same", padding_mode="reflect"
    )


class _Tdnn(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _conv(num_in, num_out, kernel, dilation)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return functional.relu(self.conv(x_BCT))


class _Res2Net(nn.Module):
    def __init__(self, width: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        part = width // scale
        self.blocks = nn.ModuleList(_Tdnn(part, part, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        first, *others = x_BCT.chunk(len(self.blocks) + 1, 1)
        outputs = [first]
        for index, (block, part) in enumerate(zip(self.blocks, others, strict=True)):
            outputs.append(block(part + outputs[-1] if index else part))
        return torch.cat(outputs, 1)


class _Squeeze(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1 = _conv(width, inner)
        self.conv2 = _conv(inner, width)

    def forward(self, x_BCT: Tensor) -> Tensor:
        mean_BC1 = functional.relu(self.conv1(x_BCT.mean(2, keepdim=True)))
        return x_BCT * torch.sigmoid(self.conv2(mean_BC1))


class _Block(nn.Module):
    def __init__(self, fields: SpeakerFields, index: int) -> None:
        super().__init__()
        width = fields.enc_channels[index]
        kernel, dilation = fields.enc_kernel_sizes[index], fields.enc_dilations[index]
        self.tdnn1 = _Tdnn(fields.enc_channels[index - 1], width)
        self.res2net_block = _Res2Net(width, fields.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = _Tdnn(width, width)
        self.se_block = _Squeeze(width, fields.enc_se_channels)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x_BCT))))
        return x_BCT + y_BCT


class _Pooling(nn.Module):
    """Attentive statistics: mean and deviation of each channel, weighted by time."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.tdnn = _Tdnn(3 * width, inner)
        self.conv = _conv(inner, width)

    def forward(self, x_BCT: Tensor) -> Tensor:
        even = torch.full_like(x_BCT[:, :1], 1 / x_BCT.shape[2])
        spread = [each.expand_as(x_BCT) for each in _statistics(x_BCT, even)]
        scores = self.conv(torch.tanh(self.tdnn(torch.cat((x_BCT, *spread), 1))))
        return torch.cat(_statistics(x_BCT, scores.softmax(2)), 1)


def _statistics(x_BCT: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean_BC1 = (weights * x_BCT).sum(2, keepdim=True)
    variance_BC1 = (weights * (x_BCT - mean_BC1).pow(2)).sum(2, keepdim=True)
    return mean_BC1, variance_BC1.clamp(1e-12).sqrt()

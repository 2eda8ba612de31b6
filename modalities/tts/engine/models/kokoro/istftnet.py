"""From features and style to samples: a style decoder and an upsampling generator.

Owns the acoustic half of the model: ISTFTNet (arXiv:2203.02395) with snake activations, and the
harmonic-plus-noise source of neural source-filter models (arXiv:1904.12088) mixed in at every rate.
The noise depends on a sentence's seed alone. Names follow the released checkpoint.

Legend: B rows, F frames (40 a second), P pitch values (two a frame), S samples, H sinusoids (the
fundamental and its overtones), C channels, T positions at the current rate, Y style size, K
frequencies, N spectra, W samples of a window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.modalities.tts.configs.kokoro import (
    NUM_HARMONICS,
    SAMPLE_RATE,
    GeneratorConfig,
    KokoroConfig,
)
from triptych.modalities.tts.engine.models.kokoro.layers import (
    EPSILON,
    AdaptiveNorm,
    LengthMask,
    Sliced,
    StyledBlock,
    convolve,
    gmacs,
)

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
        """Phases [S, H] in cycles: linear between the centers of pitch values, constant outside.

        Whole cycles are dropped in float64 once per pitch value, so that phases stay exact in long
        sentences: float32 would lose a hundredth of a radian after a few seconds.
        """
        size, device, dtype = self.samples_per_pitch, pitch_P.device, pitch_P.dtype
        overtones_H = torch.arange(1, NUM_SINUSOIDS + 1, device=device)
        step_PH = pitch_P[:, None].double() * overtones_H / SAMPLE_RATE % 1 * size
        cycles_PH = step_PH.cumsum(0) % 1
        held_1H = torch.zeros_like(step_PH[:1])
        start_QH = torch.cat((cycles_PH[:1], cycles_PH)).to(dtype)  # one segment more than values
        slope_QH = torch.cat((held_1H, step_PH[1:], held_1H)).to(dtype)
        ramp_Z1 = (torch.arange(size, device=device, dtype=dtype)[:, None] + 0.5) / size
        phase_QZH = start_QH[:, None] + ramp_Z1 * slope_QH[:, None]
        return phase_QZH.flatten(0, 1)[size // 2 : size // 2 + len(pitch_P) * size]


def source_noise(seed: int, num_samples: int) -> Tensor:
    """Standard normal noise [S, H]: for one seed the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, NUM_SINUSOIDS, generator=generator)


class SnakeBlock(nn.Module):
    """Dilated residual convolutions, each under a styled norm and a snake activation."""

    def __init__(
        self, channels: int, kernel_size: int, dilations: tuple[int, ...], style_size: int
    ) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_same_conv(channels, kernel_size, d) for d in dilations)
        self.convs2 = nn.ModuleList(_same_conv(channels, kernel_size, 1) for _ in dilations)
        self.adain1 = nn.ModuleList(AdaptiveNorm(style_size, channels) for _ in dilations)
        self.adain2 = nn.ModuleList(AdaptiveNorm(style_size, channels) for _ in dilations)
        self.alpha1, self.alpha2 = _slopes(channels, dilations), _slopes(channels, dilations)
        self.native: NativeKernels | None = None

    def forward(self, x_BCT: Tensor, style_BY: Tensor, mask: LengthMask) -> Sliced[Tensor]:
        """Map [B, C, T] to [B, C, T]."""
        first = zip(self.adain1, self.alpha1, self.convs1, strict=True)
        second = zip(self.adain2, self.alpha2, self.convs2, strict=True)
        for halves in zip(first, second, strict=True):
            y_BCT = x_BCT
            for norm, alpha_1C1, conv in halves:
                yield gmacs(conv, x_BCT)
                y_BCT = self._activate(norm, alpha_1C1, y_BCT, style_BY, mask)
                y_BCT = convolve(conv, y_BCT, x_BCT.dtype)
            x_BCT = x_BCT + y_BCT
        return x_BCT

    def _activate(
        self,
        norm: nn.Module,
        alpha_1C1: Tensor,
        x_BCT: Tensor,
        style_BY: Tensor,
        mask: LengthMask,
    ) -> Tensor:
        """Norm and snake. The native kernel, for unpadded rows only, rounds for the convolution."""
        assert isinstance(norm, AdaptiveNorm)
        if self.native is None or mask.is_padded:
            return mask.clear(_snake(norm(x_BCT, style_BY, mask), alpha_1C1))
        return self.native.styled_snake(
            x_BCT,
            norm.style(style_BY),
            alpha_1C1.flatten(),
            eps=EPSILON,
            dtype=self.convs1[0].get_parameter("weight").dtype,
        )


class Generator(nn.Module):
    """Upsamples frames to spectra, conditioned on the source's, and inverts them to samples."""

    def __init__(self, config: GeneratorConfig, style_size: int) -> None:
        super().__init__()
        rates, channels = config.upsample_rates, config.upsample_initial_channel
        self.m_source = HarmonicSource(config.samples_per_pitch)
        self.config, self.rates = config, rates
        self.ups, self.noise_convs = nn.ModuleList(), nn.ModuleList()
        self.noise_res, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for index, (rate, kernel) in enumerate(
            zip(rates, config.upsample_kernel_sizes, strict=True)
        ):
            wide, channels = channels, channels // 2
            padding = (kernel - rate) // 2
            self.ups.append(nn.ConvTranspose1d(wide, channels, kernel, rate, padding=padding))
            stride = math.prod(rates[index + 1 :])
            self.noise_convs.append(_source_conv(config.n_fft + 2, channels, stride))
            source_kernel = 11 if stride == 1 else 7
            self.noise_res.append(SnakeBlock(channels, source_kernel, (1, 3, 5), style_size))
            self.resblocks.extend(
                SnakeBlock(channels, size, dilations, style_size)
                for size, dilations in zip(
                    config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
                )
            )
        self.conv_post = nn.Conv1d(channels, config.n_fft + 2, 7, padding=3)

    def forward(
        self, x_BCT: Tensor, source_BKN: Tensor, style_BY: Tensor, mask: LengthMask
    ) -> Sliced[list[Tensor]]:
        """The samples [S] of every row. `mask` is in pitch values, as is `x_BCT`."""
        spectra = mask.upsample(math.prod(self.rates), 1)
        num_blocks = len(self.resblocks) // len(self.rates)
        for index, rate in enumerate(self.rates):
            is_last = index == len(self.rates) - 1
            yield gmacs(self.ups[index], x_BCT)
            x_BCT = convolve(self.ups[index], mask.clear(F.leaky_relu(x_BCT, 0.1)), x_BCT.dtype)
            mask = spectra if is_last else mask.upsample(rate)
            if is_last:
                x_BCT = F.pad(x_BCT, (1, 0), mode="reflect")
            guide_BCT = self.noise_convs[index](source_BKN)
            x_BCT = x_BCT + (yield from self.noise_res[index](guide_BCT, style_BY, mask))
            total_BCT = torch.zeros((), device=x_BCT.device)
            for block in self.resblocks[index * num_blocks : (index + 1) * num_blocks]:
                total_BCT = total_BCT + (yield from block(x_BCT, style_BY, mask))
            x_BCT = total_BCT / num_blocks
        yield gmacs(self.conv_post, x_BCT)
        x_BCN = self.conv_post(mask.clear(F.leaky_relu(x_BCT)))
        log_magnitude_BKN, phase_BKN = x_BCN.chunk(2, dim=1)
        spectrum_BKN = torch.polar(log_magnitude_BKN.exp(), phase_BKN.sin())
        rows = zip(spectrum_BKN, spectra.lengths, strict=True)
        return [self._inverse(spectrum_KN[:, :length]) for spectrum_KN, length in rows]

    def source(self, pitch_P: Tensor, noise_SH: Tensor) -> Tensor:
        """The spectra of one row's source: magnitudes, then phases, [2K, N].

        Phases jump between -pi and pi, so the smallest difference in pitch can be audible. Compute
        rows one by one: their bits must not depend on their batch.
        """
        n_fft = self.config.n_fft
        spectrum_KN = torch.stft(
            self.m_source(pitch_P, noise_SH),
            n_fft,
            self.config.hop,
            window=torch.hann_window(n_fft, device=pitch_P.device, dtype=pitch_P.dtype),
            return_complex=True,
        )
        return torch.cat((spectrum_KN.abs(), spectrum_KN.angle()))

    def _inverse(self, spectrum_KN: Tensor) -> Tensor:
        """`torch.istft` without its check of the window's sums, which waits for a GPU."""
        n_fft, hop, num_spectra = self.config.n_fft, self.config.hop, spectrum_KN.shape[1]
        device, dtype = spectrum_KN.device, spectrum_KN.real.dtype
        window_W = torch.hann_window(n_fft, device=device, dtype=dtype)
        pieces_NW = torch.fft.irfft(spectrum_KN.T, n_fft) * window_W
        sums = pieces_NW.new_zeros(2, num_spectra + n_fft // hop - 1, hop)
        parts = zip(pieces_NW.split(hop, 1), window_W.square().split(hop), strict=True)
        for begin, (sound, weights) in enumerate(parts):
            sums[0, begin : begin + num_spectra] += sound
            sums[1, begin : begin + num_spectra] += weights
        samples: Tensor = (sums[0] / sums[1]).flatten()
        return samples[n_fft // 2 : -(n_fft // 2)]


class KokoroDecoder(nn.Module):
    """Maps frames of phoneme features, pitch and energy to samples, in a voice's timbre."""

    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        size, style = config.hidden_size, config.style_size
        wide, narrow = config.decoder_channels, config.residual_channels
        out = config.generator.upsample_initial_channel
        mixed = wide + 2 + narrow
        self.encode = StyledBlock(size + 2, wide, style)
        self.decode = nn.ModuleList(
            (
                StyledBlock(mixed, wide, style),
                StyledBlock(mixed, wide, style),
                StyledBlock(mixed, wide, style),
                StyledBlock(mixed, out, style, is_upsampling=True),
            )
        )
        self.F0_conv = nn.Conv1d(1, 1, 3, stride=2, padding=1)
        self.N_conv = nn.Conv1d(1, 1, 3, stride=2, padding=1)
        self.asr_res = nn.Conv1d(size, narrow, 1)
        self.generator = Generator(config.generator, style)

    def forward(
        self,
        text_BCF: Tensor,
        curves: tuple[Tensor, Tensor],
        source_BKN: Tensor,
        style_BY: Tensor,
        mask: LengthMask,
    ) -> Sliced[list[Tensor]]:
        """The samples [S] of every row; `curves` are pitch and energy [B, P], `mask` is in frames.

        `curves` and `source_BKN` are padded with zeros.
        """
        yield gmacs(self.encode, text_BCF)
        pitch_BP, energy_BP = curves
        drawn = (self.F0_conv(pitch_BP[:, None]), self.N_conv(energy_BP[:, None]))
        aside = (self.asr_res(text_BCF), *drawn)
        x_BCF = self.encode(torch.cat((text_BCF, *drawn), 1), style_BY, mask)
        for block in self.decode:
            yield gmacs(block, x_BCF)
            x_BCF = block(torch.cat((x_BCF, *aside), 1), style_BY, mask)
        generated = self.generator(x_BCF, source_BKN, style_BY, mask.upsample(2))
        return (yield from generated)  # type: ignore[no-any-return]

    def use_native(self, native: NativeKernels | None) -> None:
        """Compute norms and snakes of unpadded rows with `native` kernels, if given."""
        for block in self.modules():
            if isinstance(block, SnakeBlock):
                block.native = native

    def cast_convolutions(self, dtype: torch.dtype) -> None:
        """Compute the wide convolutions in `dtype`; norms and activations are unchanged."""
        for block in self.modules():
            if isinstance(block, SnakeBlock):
                block.convs1.to(dtype)
                block.convs2.to(dtype)
            elif isinstance(block, StyledBlock):
                block.cast_convolutions(dtype)
        self.generator.ups.to(dtype)


def _same_conv(channels: int, kernel_size: int, dilation: int) -> nn.Conv1d:
    padding = dilation * (kernel_size - 1) // 2
    return nn.Conv1d(channels, channels, kernel_size, padding=padding, dilation=dilation)


def _source_conv(in_channels: int, out_channels: int, stride: int) -> nn.Conv1d:
    """Reduces the source's spectra, one per final position, to a slower rate."""
    if stride == 1:
        return nn.Conv1d(in_channels, out_channels, 1)
    return nn.Conv1d(
        in_channels, out_channels, 2 * stride, stride=stride, padding=(stride + 1) // 2
    )


def _slopes(channels: int, dilations: tuple[int, ...]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1)) for _ in dilations)


def _snake(x_BCT: Tensor, alpha_1C1: Tensor) -> Tensor:
    """The snake, x + sin(alpha x)^2 / alpha (arXiv:2006.08195)."""
    return torch.addcmul(x_BCT, torch.sin(x_BCT * alpha_1C1).square_(), 1 / alpha_1C1)

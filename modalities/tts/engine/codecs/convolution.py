"""Convolutions that remember: a ring of past inputs, or the tail of past outputs.

Owns the streaming twins of `Conv1d`, `ConvTranspose1d` and overlap-add synthesis. No input is
convolved twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs.stages import Misfit, StreamingStage
from triptych.modalities.tts.engine.codecs.step import CodecStep, Padding, SignalRate, SlotState

# On a CPU, up to so many steps of a row, torch's kernels spend longer on repacking weights than
# on a plain matrix product (several times, for the wide layers that come first in decoders).
_FEW_STEPS = 40


class StreamingConv1d(StreamingStage):
    """A `Conv1d` over its last inputs and the new ones.

    `pads` are the steps padded before the start and beyond the end. Reading ahead becomes lag;
    so does reflection at the start, which must see the steps it reflects.
    """

    def __init__(
        self, conv: nn.Conv1d, pads: tuple[int, int], padding: Padding = Padding.ZEROS
    ) -> None:
        super().__init__()
        # Effective weights: a weight-normalised layer would compute them anew at each call.
        self.weight, self.bias = conv.weight.detach(), _detach(conv.bias)
        self.stride, self.dilation = conv.stride[0], conv.dilation[0]
        self.groups, self.padding = conv.groups, padding
        self.span = (conv.kernel_size[0] - 1) * self.dilation
        self.pad_left, self.pad_right = pads
        if self.pad_left > self.span:
            raise Misfit(f"{self.pad_left} steps of padding exceed the kernel.")
        if padding is Padding.REFLECT and self.pad_right:
            raise Misfit("reflects at the end of the stream, too.")
        self.state = SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Lag grows by what the window reads ahead, rounded up to whole strides."""
        if signal.rate % self.stride:
            raise WeightsError(f"Stride {self.stride} does not divide {signal.rate} steps a frame.")
        ahead = self.span - self.pad_left
        hold = max(0, self.pad_left - ahead) if self.padding is Padding.REFLECT else 0
        lag = -(-(signal.lag + ahead + hold - self.stride + 1) // self.stride)
        self.signal = signal
        self.num_past = lag * self.stride + self.pad_left - signal.lag
        surplus = (self.pad_left + self.pad_right - self.span - 1 - signal.short) // self.stride + 1
        self.end = SignalRate(signal.rate // self.stride, lag, -surplus)
        return self.end

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Convolve the window that ends with the new steps."""
        num_out = step.num_steps(self.end)
        if not num_out:
            return x_BCT.new_empty(len(x_BCT), len(self.weight), 0)
        if self.num_past:
            past_BCL = step.read(self.state, (x_BCT.shape[1], self.num_past), x_BCT)
            x_BCT = torch.cat((past_BCL, x_BCT), -1)
            step.keep(self.state, x_BCT, self.num_past, self.signal.rate)
        # Either way: a flush must make up what is beyond the end, reflection holds steps back.
        num_in = (num_out - 1) * self.stride + self.span + 1
        if num_in > x_BCT.shape[-1]:
            x_BCT = functional.pad(x_BCT, (0, num_in - x_BCT.shape[-1]))
        if self.span:
            x_BCT = step.at_edges(x_BCT, self.signal, self.num_past, self.padding)
        x_BCT = x_BCT[..., :num_in]
        is_plain = self.groups == 1 or self.groups == x_BCT.shape[1] == len(self.weight)
        if x_BCT.is_cpu and is_plain and num_out <= _FEW_STEPS:
            return self._product(x_BCT, num_out)
        return functional.conv1d(
            x_BCT, self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )

    def _product(self, x_BCT: Tensor, num_out: int) -> Tensor:
        """As one product, of matrices or by channel, without repacking the weights."""
        width = self.weight.shape[-1]
        at_row, at_channel, at_step = x_BCT.stride()
        windows_BTCK = x_BCT.as_strided(
            (len(x_BCT), num_out, x_BCT.shape[1], width),
            (at_row, at_step * self.stride, at_channel, at_step * self.dilation),
            x_BCT.storage_offset(),
        )
        if self.groups == 1:
            y_BTC = functional.linear(windows_BTCK.flatten(2), self.weight.flatten(1), self.bias)
            return y_BTC.transpose(1, 2)
        y_BTC = (windows_BTCK * self.weight[:, 0]).sum(-1)
        return (y_BTC if self.bias is None else y_BTC + self.bias).transpose(1, 2)


class OverlapTail(StreamingStage):
    """A linear map from each input step to `width` output steps, `stride` apart, summed.

    The part of a sum that later inputs will add to is kept and added then. `trims` are the steps
    cut from the start and the end of the whole; a cut at the start is lag.
    """

    def __init__(self, stride: int, width: int, trims: tuple[int, int]) -> None:
        super().__init__()
        self.stride, self.num_tail = stride, max(0, width - stride)
        self.trim_left = trims[0]
        self.surplus = width - stride - sum(trims)
        self.state = SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """The rate grows by the stride."""
        self.signal = signal
        lag = signal.lag * self.stride + self.trim_left
        short = signal.short * self.stride - self.surplus
        if lag < short:
            raise WeightsError(f"Trimming {short - lag} steps of the end is not supported.")
        self.end = SignalRate(signal.rate * self.stride, lag, short)
        return self.end

    def spread(self, x_BCT: Tensor) -> Tensor:
        """All sums that these steps alone make, [B, C', (T - 1) * stride + width]."""
        raise NotImplementedError

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Finished sums only."""
        x_BCT = step.without_invalid(x_BCT, self.signal.rate)
        x_BCT = step.at_edges(x_BCT, self.signal, 0)
        if step.is_flush:
            x_BCT = functional.pad(x_BCT, (0, 1))  # one silent step leaves all tails finished
        full = self.spread(x_BCT)
        if self.num_tail:
            tail = step.read(self.state, (full.shape[1], self.num_tail), full)
            full[..., : self.num_tail] += tail
            step.keep(self.state, full, self.num_tail, self.end.rate)
        num_out = step.num_steps(self.end)
        if num_out > full.shape[-1]:
            full = functional.pad(full, (0, num_out - full.shape[-1]))  # a stride beyond the width
        return full[..., :num_out]


class StreamingConvTranspose1d(OverlapTail):
    """A `ConvTranspose1d` whose overlap with the next inputs is carried over."""

    def __init__(self, conv: nn.ConvTranspose1d, trims: tuple[int, int] | None = None) -> None:
        width = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1
        padding = int(conv.padding[0])
        own = (padding, padding - conv.output_padding[0])
        super().__init__(conv.stride[0], width, trims or own)
        self.weight, self.bias = conv.weight.detach(), _detach(conv.bias)
        self.dilation, self.groups = conv.dilation[0], conv.groups

    def spread(self, x_BCT: Tensor) -> Tensor:
        """The transposed convolution, untrimmed and without bias."""
        if x_BCT.is_cpu and self.groups == self.dilation == 1:
            return self._product(x_BCT)
        return functional.conv_transpose1d(
            x_BCT, self.weight, None, self.stride, 0, 0, self.groups, self.dilation
        )

    def _product(self, x_BCT: Tensor) -> Tensor:
        """As one matrix product, which for any number of steps is no slower than torch's kernel."""
        kernel = self.weight.shape[-1]
        columns_BTN = x_BCT.transpose(1, 2) @ self.weight.flatten(1)
        length = (x_BCT.shape[-1] - 1) * self.stride + kernel
        full = functional.fold(
            columns_BTN.transpose(1, 2), (1, length), (1, kernel), stride=(1, self.stride)
        )
        return full[:, :, 0]

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Bias belongs to finished sums, once."""
        y_BCT = super().forward(x_BCT, step)
        return y_BCT if self.bias is None else y_BCT + self.bias[:, None]


def _detach(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()

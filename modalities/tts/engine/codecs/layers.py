"""Layers with streaming state per row: convolutions, an LSTM, and windowed attention.

Owns the streaming twins of `Conv1d` (a ring of past inputs), `ConvTranspose1d` and overlap-add (the
tail of past outputs), `LSTM` (its hidden state), and of transformers' decoder layers (a window of
keys and values). No input is convolved twice; attention is computed by the library itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs.stages import (
    CodecStep,
    Padding,
    SignalRate,
    SlotState,
    StreamingStage,
    Unstreamable,
)

# On a CPU, up to this many steps of a row, torch's kernels spend longer on repacking weights than
# on a plain matrix product (several times, for the wide layers that come first in decoders).
_FEW_STEPS = 40
# Up to this many steps, torch's fused LSTM spends longer on packing weights than on the steps.
_FEW_LSTM_STEPS = 4


class StreamingConv1d(StreamingStage):
    """A `Conv1d` over its last inputs and the new ones.

    `pads` are the steps padded before the start and beyond the end. Lookahead becomes lag;
    reflection at the start also does, because it needs the steps that it reflects.
    """

    def __init__(
        self, conv: nn.Conv1d, pads: tuple[int, int], padding: Padding = Padding.ZEROS
    ) -> None:
        super().__init__()
        # Effective weights: a weight-normalized layer would compute them at each call.
        self.weight, self.bias = conv.weight.detach(), _detach(conv.bias)
        self.stride, self.dilation = conv.stride[0], conv.dilation[0]
        self.groups, self.padding = conv.groups, padding
        self.span = (conv.kernel_size[0] - 1) * self.dilation
        self.pad_left, self.pad_right = pads
        if self.pad_left > self.span:
            raise Unstreamable(f"{self.pad_left} steps of padding exceed the kernel.")
        if padding is Padding.REFLECT and self.pad_right:
            raise Unstreamable("also reflects at the end of the stream.")
        self.state = SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Lag grows by the window's lookahead, rounded up to whole strides."""
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
        if x_BCT.is_cuda and self._is_steady(step):
            return self._on_gpu(x_BCT, step, num_out)
        if self.num_past:
            past_BCL = step.read(self.state, (x_BCT.shape[1], self.num_past), x_BCT)
            x_BCT = torch.cat((past_BCL, x_BCT), -1)
            step.keep(self.state, x_BCT, self.num_past, self.signal.rate)
        # In either case: a flush lacks the steps beyond the end, reflection delays steps.
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

    def _is_steady(self, step: CodecStep) -> bool:
        """Whether the window holds only past and new steps, of rows past their start."""
        from triptych.core.runtime.kernels.triton.stream_conv import is_supported

        has_edge = self.span > 0 and step.has_edge(self.signal, self.num_past, self.padding)
        is_plain = not (has_edge or step.is_flush)
        return is_plain and is_supported(self.weight, self.groups, self.num_past)

    def _on_gpu(self, x_BCT: Tensor, step: CodecStep, num_out: int) -> Tensor:
        """Convolve without concatenating past and new steps; advances the past."""
        from triptych.core.runtime.kernels.triton.stream_conv import stream_conv

        y_BOT: Tensor = stream_conv(
            x_BCT,
            step.slots(self.state, (x_BCT.shape[1], self.num_past), x_BCT),
            step.rows_B,
            None if step.valid_B is None else step.valid_B * self.signal.rate,
            self.weight,
            self.bias,
            self.stride,
            self.dilation,
            num_out,
        )
        return y_BOT

    def _product(self, x_BCT: Tensor, num_out: int) -> Tensor:
        """Convolve as one product, of matrices or by channel, without repacking the weights."""
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

    The sums that later inputs add to are kept until then. `trims` are the steps cut from the start
    and the end of the whole stream; a cut at the start is lag.
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
        """All sums of these steps alone, [B, C', (T - 1) * stride + width]."""
        raise NotImplementedError

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Return finished sums only."""
        x_BCT = step.without_invalid(x_BCT, self.signal.rate)
        x_BCT = step.at_edges(x_BCT, self.signal, 0)
        if step.is_flush:
            x_BCT = functional.pad(x_BCT, (0, 1))  # one silent step finishes all tails
        full = self.spread(x_BCT)
        if self.num_tail:
            tail = step.read(self.state, (full.shape[1], self.num_tail), full)
            full[..., : self.num_tail] += tail
            step.keep(self.state, full, self.num_tail, self.end.rate)
        num_out = step.num_steps(self.end)
        if num_out > full.shape[-1]:
            full = functional.pad(
                full, (0, num_out - full.shape[-1])
            )  # the stride may exceed the width
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
        """Compute one matrix product, never slower than torch's kernel."""
        kernel = self.weight.shape[-1]
        columns_BTN = x_BCT.transpose(1, 2) @ self.weight.flatten(1)
        length = (x_BCT.shape[-1] - 1) * self.stride + kernel
        full = functional.fold(
            columns_BTN.transpose(1, 2), (1, length), (1, kernel), stride=(1, self.stride)
        )
        return full[:, :, 0]

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Add the bias to finished sums, once."""
        y_BCT = super().forward(x_BCT, step)
        return y_BCT if self.bias is None else y_BCT + self.bias[:, None]


def _detach(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


class StreamingLSTM(StreamingStage):
    """A unidirectional `LSTM` over [B, C, T] with its state carried per row."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        if lstm.bidirectional:
            raise Unstreamable("also runs backwards over the whole utterance.")
        if lstm.batch_first or lstm.proj_size:
            raise Unstreamable(
                "is not a time-first LSTM without projections, the only kind that can stream."
            )
        self.lstm = lstm
        self.hidden, self.cell = SlotState(), SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Causal: adds no lag."""
        self.signal = signal
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Continue from each row's state."""
        if not x_BCT.shape[-1]:
            return x_BCT
        x_TBC = x_BCT.permute(2, 0, 1)
        size = (self.lstm.num_layers, self.lstm.hidden_size)
        hidden, cell = (
            step.read(state, size, x_BCT).transpose(0, 1) for state in (self.hidden, self.cell)
        )
        is_partial = step.is_ragged or step.has_edge(self.signal, 0)
        if is_partial or (x_BCT.is_cpu and len(x_TBC) <= _FEW_LSTM_STEPS):
            live_TB = self._live(len(x_TBC), step).T if is_partial else None
            y_TBC, hidden, cell = self._step_by_step(x_TBC, hidden, cell, live_TB)
        else:
            y_TBC, (hidden, cell) = self.lstm(x_TBC, (hidden.contiguous(), cell.contiguous()))
        step.write(self.hidden, hidden.transpose(0, 1))
        step.write(self.cell, cell.transpose(0, 1))
        return y_TBC.permute(1, 2, 0)

    def _step_by_step(
        self, x_TBC: Tensor, hidden_NBH: Tensor, cell_NBH: Tensor, live_TB: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run time steps one by one, keeping a row's state where a step is outside its stream.

        N layers, H hidden channels.
        """
        states = list(zip(hidden_NBH, cell_NBH, strict=True))
        outputs = []
        for index, y_BH in enumerate(x_TBC):
            for layer, weights in enumerate(self.lstm.all_weights):
                old = states[layer]
                new = torch.lstm_cell(y_BH, old, *weights)
                y_BH = new[0]  # noqa: PLW2901 - each layer's output is the next one's input
                if live_TB is not None:
                    live_B1 = live_TB[index][:, None]
                    new = (new[0].where(live_B1, old[0]), new[1].where(live_B1, old[1]))
                states[layer] = new
            outputs.append(y_BH)
        hidden, cell = zip(*states, strict=True)
        return torch.stack(outputs), torch.stack(hidden), torch.stack(cell)

    def _live(self, num_steps: int, step: CodecStep) -> Tensor:
        is_live_BT = step.times(self.signal, num_steps) >= 0
        if step.valid_B is not None:
            arrivals_T = torch.arange(num_steps, device=is_live_BT.device)
            is_live_BT &= arrivals_T < step.valid_B[:, None] * self.signal.rate
        return is_live_BT


class StreamingTransformer(StreamingStage):
    """A stack of transformers' decoder layers with sliding-window causal attention.

    Each layer takes, in this order, hidden states, a mask and a cache (an object with `update`),
    and `position_embeddings`, as Mimi's do. `rotary` maps positions [B, T] to cosines and sines.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        window: int,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rotary, self.window = rotary, window
        self.windows = nn.ModuleList(_KeyValueWindow(window - 1) for _ in layers)

    def bind(self, signal: SignalRate) -> SignalRate:
        """Causal: adds no lag."""
        self.signal = signal
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Attend to the window and the new steps."""
        num_new = x_BCT.shape[-1]
        if not num_new:
            return x_BCT
        # In rows this young no older keys exist: short streams cost no more than one-shot decoding.
        num_past = min(self.window - 1, step.max_start * self.signal.rate)
        x_BCT = step.without_invalid(x_BCT, self.signal.rate)
        times_BT = step.times(self.signal, num_new)
        past_and_new_BK = step.times(self.signal, num_past + num_new, before=num_past)
        visible_BTK = window_mask(times_BT, past_and_new_BK, self.window)
        # Added to scores, which every attention implementation supports.
        mask = x_BCT.new_zeros(()).where(visible_BTK[:, None], -torch.inf)
        x_BTC = x_BCT.transpose(1, 2)
        position_embeddings = self.rotary(x_BTC, times_BT.clamp(min=0))
        for layer, window in zip(self.layers, self.windows, strict=True):
            assert isinstance(window, _KeyValueWindow)
            window.enter(step, self.signal.rate, num_past)
            y = layer(x_BTC, mask, window, position_embeddings=position_embeddings)
            x_BTC = y[0] if isinstance(y, tuple) else y  # older transformers
        return x_BTC.transpose(1, 2)


def window_mask(times_BT: Tensor, key_times_BK: Tensor, window: int) -> Tensor:
    """The keys that each query sees, [B, T, K]: itself and the `window` - 1 before, from time 0.

    A query before time 0 sees itself, so that its output, which is discarded, is finite.
    """
    queries, keys = times_BT[:, :, None], key_times_BK[:, None]
    return (keys <= queries) & (keys > queries - window) & ((keys >= 0) | (keys == queries))


class _KeyValueWindow(nn.Module):
    """Past keys and values of one layer, in the form of transformers' cache."""

    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self.num_kept = num_kept
        self.keys, self.values = SlotState(), SlotState()

    def enter(self, step: CodecStep, rate: int, num_past: int) -> None:
        self._step, self._rate, self._num_past = step, rate, num_past

    def update(
        self, keys: Tensor, values: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D], preceded by `num_past` earlier ones."""
        return self._join(self.keys, keys), self._join(self.values, values)

    def _join(self, state: SlotState, new_BKTD: Tensor) -> Tensor:
        step = self._step
        new_BKDT = new_BKTD.transpose(2, 3)
        past = step.read(state, (*new_BKDT.shape[1:3], self.num_kept), new_BKDT)
        full = torch.cat((past, new_BKDT), -1)
        step.keep(state, full, self.num_kept, self._rate)
        return full[..., self.num_kept - self._num_past :].transpose(2, 3)

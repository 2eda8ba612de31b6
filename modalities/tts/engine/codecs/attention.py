"""Causal windowed attention over a carried key/value window.

Owns the window, its mask and the rotary positions; runs the library's own layers for the maths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from triptych.modalities.tts.engine.codecs.stages import StreamingStage
from triptych.modalities.tts.engine.codecs.step import CodecStep, SignalRate, SlotState


class StreamingTransformer(StreamingStage):
    """A stack of transformers' decoder layers with sliding-window causal attention.

    Each layer takes `hidden_states`, `attention_mask`, `position_embeddings` and
    `past_key_values` (an object with `update`), as all of transformers' do. `rotary` maps
    positions [B, T] to cosines and sines.
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
        """Causal: no lag of its own."""
        self.signal = signal
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Attend to the window and the new steps."""
        num_new = x_BCT.shape[-1]
        if not num_new:
            return x_BCT
        # Rows this young have nothing further back: short streams cost what one-shot costs.
        num_past = min(self.window - 1, step.max_start * self.signal.rate)
        x_BCT = step.without_invalid(x_BCT, self.signal.rate)
        times_BT = step.times(self.signal, num_new)
        past_and_new_BK = step.times(self.signal, num_past + num_new, before=num_past)
        visible_BTK = window_mask(times_BT, past_and_new_BK, self.window)
        # Added to scores, which every attention implementation understands alike.
        mask = x_BCT.new_zeros(()).where(visible_BTK[:, None], -torch.inf)
        x_BTC = x_BCT.transpose(1, 2)
        position_embeddings = self.rotary(x_BTC, times_BT.clamp(min=0))
        for layer, window in zip(self.layers, self.windows, strict=True):
            assert isinstance(window, _KeyValueWindow)
            window.enter(step, self.signal.rate, num_past)
            y = layer(
                x_BTC,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                past_key_values=window,
            )
            x_BTC = y[0] if isinstance(y, tuple) else y  # older transformers
        return x_BTC.transpose(1, 2)


def window_mask(times_BT: Tensor, key_times_BK: Tensor, window: int) -> Tensor:
    """Which keys each query sees, [B, T, K]: itself and the `window` - 1 before, from time 0 on.

    A query before time 0 sees itself, so that its output, which nobody uses, is finite.
    """
    queries, keys = times_BT[:, :, None], key_times_BK[:, None]
    return (keys <= queries) & (keys > queries - window) & ((keys >= 0) | (keys == queries))


class _KeyValueWindow(nn.Module):
    """Past keys and values of one layer, in the shape of transformers' cache."""

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

"""An LSTM whose hidden state outlives the call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.modalities.tts.codecs.stages import Misfit, Stage
from triptych.modalities.tts.codecs.step import Signal, SlotState, Step


class StreamingLSTM(Stage):
    """A unidirectional `LSTM` over [B, C, T] with its state carried per row."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        if lstm.bidirectional:
            raise Misfit("runs backwards, too, over the whole utterance.")
        self.lstm = lstm
        self.hidden, self.cell = SlotState(), SlotState()

    def bind(self, signal: Signal) -> Signal:
        """Causal: no lag of its own."""
        self.signal = signal
        return signal

    def forward(self, x_BCT: Tensor, step: Step) -> Tensor:
        """Run on from each row's state."""
        x_TBC = x_BCT.permute(2, 0, 1)
        if self.lstm.batch_first:
            x_TBC = x_TBC.transpose(0, 1)
        size = (self.lstm.num_layers, self.lstm.hidden_size)
        state = tuple(
            step.read(s, size, x_BCT).transpose(0, 1).contiguous() for s in (self.hidden, self.cell)
        )
        if step.is_ragged or step.has_edge(self.signal, 0):
            y, state = self._run_where_live(x_TBC, state, step)
        else:
            y, state = self.lstm(x_TBC, state)
        for kept, value in zip((self.hidden, self.cell), state, strict=True):
            step.write(kept, value.transpose(0, 1))
        if self.lstm.batch_first:
            y = y.transpose(0, 1)
        y_BCT: Tensor = y.permute(1, 2, 0)
        return y_BCT

    def _run_where_live(
        self, x: Tensor, state: tuple[Tensor, ...], step: Step
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Step by step, keeping a row's state where the step is not of its stream."""
        time = 1 if self.lstm.batch_first else 0
        live_TB = self._live(x.shape[time], step).T
        outputs = []
        for index in range(x.shape[time]):
            y, new = self.lstm(x.narrow(time, index, 1), state)
            live_1B1 = live_TB[index][None, :, None]
            state = tuple(n.where(live_1B1, o) for n, o in zip(new, state, strict=True))
            outputs.append(y)
        return torch.cat(outputs, time), state

    def _live(self, num_steps: int, step: Step) -> Tensor:
        is_live_BT = step.times(self.signal, num_steps) >= 0
        if step.valid_B is not None:
            arrivals_T = torch.arange(num_steps, device=is_live_BT.device)
            is_live_BT &= arrivals_T < step.valid_B[:, None] * self.signal.rate
        return is_live_BT

"""An LSTM whose hidden state outlives the call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.modalities.tts.engine.codecs.stages import Misfit, StreamingStage
from triptych.modalities.tts.engine.codecs.step import CodecStep, SignalRate, SlotState

# Up to so many steps, on a CPU, torch's fused kernel spends longer on packing weights than on them.
_FEW_STEPS = 4


class StreamingLSTM(StreamingStage):
    """A unidirectional `LSTM` over [B, C, T] with its state carried per row."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        if lstm.bidirectional:
            raise Misfit("runs backwards, too, over the whole utterance.")
        if lstm.batch_first or lstm.proj_size:
            raise Misfit("only time-first LSTMs without projections have a streaming twin.")
        self.lstm = lstm
        self.hidden, self.cell = SlotState(), SlotState()

    def bind(self, signal: SignalRate) -> SignalRate:
        """Causal: no lag of its own."""
        self.signal = signal
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Run on from each row's state."""
        if not x_BCT.shape[-1]:
            return x_BCT
        x_TBC = x_BCT.permute(2, 0, 1)
        size = (self.lstm.num_layers, self.lstm.hidden_size)
        hidden, cell = (
            step.read(state, size, x_BCT).transpose(0, 1) for state in (self.hidden, self.cell)
        )
        is_partial = step.is_ragged or step.has_edge(self.signal, 0)
        if is_partial or (x_BCT.is_cpu and len(x_TBC) <= _FEW_STEPS):
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
        """One time step after another, keeping a row's state where the step is not of its stream.

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

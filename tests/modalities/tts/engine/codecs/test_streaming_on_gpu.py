"""Streaming convolutions by the kernels of a GPU against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.gpu_rehearsal import rehearse_gpu
from triptych.core.runtime.kernels.triton import stream_conv
from triptych.modalities.tts.engine.codecs.layers import StreamingConv1d
from triptych.modalities.tts.engine.codecs.stages import CodecStep, Padding, SignalRate

pytestmark = pytest.mark.gpu
LAYERS = {
    "causal": lambda: StreamingConv1d(nn.Conv1d(3, 5, 4, dilation=2), (6, 0)),
    "ahead": lambda: StreamingConv1d(nn.Conv1d(3, 5, 5, bias=False), (2, 2)),
    "strided": lambda: StreamingConv1d(nn.Conv1d(3, 4, 4, stride=2), (2, 0), Padding.REPLICATE),
    "by channel": lambda: StreamingConv1d(nn.Conv1d(3, 3, 7, groups=3), (3, 3)),
    "pointwise": lambda: StreamingConv1d(nn.Conv1d(3, 6, 1), (0, 0)),
}
# Rows, frames that each had before, and new frames; of the third push some are not valid.
PUSHES = [
    ((0, 2), (0, 0), 2, None),
    ((2, 0), (2, 2), 3, None),
    ((0, 1, 2), (5, 0, 5), 2, (1, 2, 2)),
]
PUSHES += [((2, 0), (7, 6), 4, None)]
FRAME = 4


@torch.inference_mode()
def streamed(layer: StreamingConv1d, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer.bind(SignalRate(FRAME))
    layer.state.tensor = None
    parts = []
    for rows, starts, num_frames, valid in PUSHES:
        x_BCT = torch.randn(len(rows), 3, num_frames * FRAME, generator=generator).to(device)
        counts = valid or (num_frames,) * len(rows)
        step = CodecStep(
            rows,
            num_frames=num_frames,
            starts=starts,
            num_valid=counts,
            seeds=torch.zeros(3, device=device).long(),
        )
        y_BCT = layer(x_BCT, step)
        ends = [count * layer.end.rate for count in counts]
        parts += [row[:, :end].cpu() for row, end in zip(y_BCT, ends, strict=True)]
    assert layer.num_past == 0 or layer.state.tensor is not None
    return parts if layer.state.tensor is None else [*parts, layer.state.tensor.cpu().clone()]


@pytest.mark.parametrize("name", LAYERS)
def test_pushes_equal_torch_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    layer = LAYERS[name]()
    expected = streamed(layer, torch.device("cpu"))
    device = rehearse_gpu(monkeypatch)
    layer = layer.to(device)
    num_launched = []
    launch = stream_conv.stream_conv
    monkeypatch.setattr(
        stream_conv, "stream_conv", lambda *given: num_launched.append(1) or launch(*given)
    )
    found = streamed(layer, device)
    monkeypatch.undo()
    assert (name == "pointwise") == (not num_launched)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)

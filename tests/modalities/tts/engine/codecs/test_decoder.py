"""Stacks of random layers, streamed in random chunks, equal torch's own forward."""

from __future__ import annotations

from types import MappingProxyType

import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from triptych.core.errors import WeightsError
from triptych.modalities.tts.engine.codecs.builder import build
from triptych.modalities.tts.engine.codecs.decoder import Adapter, StreamingDecoder, stream_row
from triptych.modalities.tts.engine.codecs.stages import Chain, Pointwise

WIDTH = 4
RULES = MappingProxyType({"Recurrent": lambda walk: walk.at("lstm").stage()})


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    kernel, dilation = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    span = (kernel - 1) * dilation
    return nn.Conv1d(
        WIDTH,
        WIDTH,
        kernel,
        stride=draw(st.sampled_from([1, 1, 2])),
        padding=draw(st.sampled_from([0, span // 2, span])),
        dilation=dilation,
        groups=draw(st.sampled_from([1, 2, WIDTH])),
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "replicate"])),
    )


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> nn.Module:
    kernel, stride = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 4]))
    dilation = draw(st.integers(1, 2))
    return nn.ConvTranspose1d(
        WIDTH,
        WIDTH,
        kernel,
        stride,
        padding=draw(st.integers(0, (kernel - 1) * dilation // 2)),
        output_padding=draw(st.integers(0, max(stride, dilation) - 1)),
        groups=draw(st.sampled_from([1, 2])),
        bias=draw(st.booleans()),
        dilation=dilation,
    )


class Recurrent(nn.Module):
    """An LSTM among convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return self.lstm(x_BCT.permute(2, 0, 1))[0].permute(1, 2, 0)


LAYERS = st.one_of(
    convolutions(),
    transposed_convolutions(),
    st.just(nn.ELU()),
    st.builds(Recurrent),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    layers=st.lists(LAYERS, min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_any_stack_of_layers_streams_exactly(layers: list[nn.Module], chunks: list[int]) -> None:
    torch.manual_seed(0)
    # Four steps a frame, so that strides have something to divide.
    stack = nn.Sequential(nn.ConvTranspose1d(WIDTH, WIDTH, 4, 4), *layers).double()
    features = torch.randn(1, WIDTH, sum(chunks), dtype=torch.float64)
    try:
        decoder = StreamingDecoder(adapter_of(stack), num_rows=1, verify=False)
        with torch.inference_mode():
            whole = stack(features)[0, 0]
    except WeightsError:  # trims, or strides, that streams do not allow
        reject()
    except RuntimeError:  # too short for a kernel without padding
        reject()
    streamed = stream_row(decoder, features, chunks)
    assert streamed.shape == whole.shape
    assert torch.allclose(streamed, whole, rtol=0, atol=1e-10)


def adapter_of(stack: nn.Module) -> Adapter:
    return Adapter(
        stage=Chain(build(stack, RULES, path="stack"), Pointwise(lambda x_BCT: x_BCT[:, :1])),
        embed=lambda x_BCT: x_BCT.double(),
        one_shot=lambda x_BCT: stack(x_BCT)[:, 0],
        sample_rate=8,
        num_codebooks=WIDTH,
        codebook_size=2,
        weight=torch.empty(0, dtype=torch.float64),
    )

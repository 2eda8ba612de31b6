"""Layers of other libraries' models with weights in blocks: which, what they compute, what they
take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding, linear

from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.block_layers import (
    BlockDevice,
    BlockEmbedding,
    BlockLinear,
    BlockPlace,
    block_bytes,
    block_places,
    hold_blocks,
)
from triptych.core.runtime.tensors.quantize import quantize_blocks
from triptych.core.weights.encoding import WeightEncoding

WIDTH, NUM_WORDS = 64, 8192
CPU = torch.device("cpu")


class Encoder(nn.Module):
    """Words, two layers, a way out; the words are tied to a second table, as T5's are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Embedding(NUM_WORDS, WIDTH)
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.words.weight = self.shared.weight
        self.places = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH, bias=False))
            for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def made(place: BlockPlace, weight: torch.Tensor) -> PackedTensor:
    return quantize_blocks(weight, place.format)


def held(model: nn.Module, kind: str, native: NativeKernels | None) -> list[BlockPlace]:
    places = block_places(model, WeightEncoding(kind))
    hold_blocks(model, places, made, BlockDevice(device=CPU, dtype=torch.float32, native=native))
    return places


def test_blocks_are_made_of_layers_and_words_and_not_of_a_models_ends() -> None:
    places = {place.name: place.format.name for place in block_places(Encoder(), wish("q4_0"))}
    assert places == {
        "layers.0.0.weight": "q4_0",
        "layers.0.2.weight": "q4_0",
        "layers.1.0.weight": "q4_0",
        "layers.1.2.weight": "q4_0",
        "shared.weight": "q4_0" if WIDTH % 256 == 0 else "q8_0",
    }


def wish(kind: str) -> WeightEncoding:
    return WeightEncoding(kind)


def test_what_a_file_has_in_blocks_stays_so_wherever_it_is() -> None:
    stored = WeightEncoding("auto", {"out.weight": "q4_1", "layers.0.0.weight": "q6_k"})
    places = {place.name: place.format.name for place in block_places(Encoder(), stored)}
    assert places == {"out.weight": "q4_1", "layers.0.0.weight": "q6_k"}
    assert not block_places(Encoder(), WeightEncoding("bfloat16"))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("is_native", [True, False])
def test_outputs_are_those_of_the_blocks_values(
    kind: str, is_native: bool, native: NativeKernels
) -> None:
    plain, model, ids = Encoder(), Encoder(), torch.arange(48).view(2, 24) * 31
    for place in block_places(plain, WeightEncoding(kind)):
        weight = place.layer.weight
        weight.copy_(made(place, weight).dequantize(torch.float32))
    places = held(model, kind, native if is_native else None)
    assert isinstance(model.shared, BlockEmbedding)
    assert model.shared is model.words
    assert torch.equal(model.words(ids), embedding(ids, plain.words.weight))
    # Without kernels the values are multiplied; with them inputs have eight bits, too.
    atol = 0.03 if is_native else 1e-5
    torch.testing.assert_close(model(ids), plain(ids), atol=atol, rtol=0.01)
    assert block_bytes(model) == pytest.approx(sum(place.num_bytes for place in places), rel=0.03)
    state = model.state_dict()
    assert all(state[place.name].isnan().all() for place in places)
    assert sum(value.untyped_storage().nbytes() for value in state.values()) < 60_000


def test_a_row_is_the_same_alone_and_in_a_batch(native: NativeKernels) -> None:
    model = Encoder()
    held(model, "q8_0", native)
    layer = model.layers[0][0]
    assert isinstance(layer, BlockLinear)
    x_BTI = torch.randn(3, 40, WIDTH, generator=torch.Generator().manual_seed(2))
    together = layer(x_BTI)
    for batch, row in ((0, 0), (1, 7), (2, 39)):
        assert torch.equal(layer(x_BTI[batch, row]), together[batch, row])


def test_another_type_is_refused_as_torch_does(native: NativeKernels) -> None:
    where = BlockDevice(device=CPU, dtype=torch.float32, native=native)
    layer = nn.Linear(WIDTH, 8)
    packed = BlockLinear(layer, made_of(layer), where)
    with pytest.raises(RuntimeError, match="float64"):
        packed(torch.zeros(1, WIDTH, dtype=torch.float64))
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
    values = made_of(layer).dequantize(torch.float32)
    torch.testing.assert_close(packed(x), linear(x, values, layer.bias), atol=0.02, rtol=0.02)


def made_of(layer: nn.Linear) -> PackedTensor:
    form = WeightEncoding("q8_0").format_of("", WIDTH)
    assert form is not None
    return quantize_blocks(layer.weight.detach(), form)

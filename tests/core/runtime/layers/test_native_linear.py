"""The stand-in for torch's linear layer, and what the walk leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import NativeLinear, pack_linears

NUM_INPUTS, NUM_OUTPUTS = 1536, 72
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, native: NativeKernels) -> torch.dtype:
    if not native.can_pack(torch.zeros(2, 2, dtype=request.param)):
        pytest.skip(f"the kernels do not project {request.param} on this processor")
    assert isinstance(request.param, torch.dtype)
    return request.param


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def linear(dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_is_the_same_alone_and_in_any_batch(
    native: NativeKernels, dtype: torch.dtype, bias: bool
) -> None:
    plain = linear(dtype, bias=bias)
    packed = NativeLinear(plain, native)
    x_BTI = random(3, 7, NUM_INPUTS, dtype=dtype)
    y_BTO = packed(x_BTI)
    torch.testing.assert_close(y_BTO, plain(x_BTI), atol=1e-2, rtol=1e-2)
    for batch in range(3):
        assert torch.equal(packed(x_BTI[batch]), y_BTO[batch])
        for row in range(7):
            assert torch.equal(packed(x_BTI[batch, row]), y_BTO[batch, row])
    assert torch.equal(packed(x_BTI.transpose(0, 1)), y_BTO.transpose(0, 1))
    assert packed(x_BTI[:0]).shape == (0, 7, NUM_OUTPUTS)


def test_packed_linear_keeps_shape_and_dtype_of_its_weight(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    model = nn.Sequential(linear(dtype))
    shape, bias = model[0].weight.shape, model[0].bias
    pack_linears(model, native)
    packed = model[0]
    assert isinstance(packed, NativeLinear)
    assert (packed.weight.shape, packed.weight.dtype, packed.weight.device.type) == (
        shape,
        dtype,
        "cpu",
    )
    assert packed.bias is bias
    assert packed.weight.untyped_storage().nbytes() == dtype.itemsize
    assert packed.weight.isnan().all()


def test_another_type_is_refused_as_torch_does(native: NativeKernels, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="float64"):
        NativeLinear(linear(dtype), native)(torch.zeros(1, NUM_INPUTS, dtype=torch.float64))


class Reading(nn.Module):
    """Multiplies by one weight itself, as Mamba does; of the other it reads the type alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.read, self.called = linear(dtype), linear(dtype)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        x_TI = x_TI.to(self.called.weight.dtype)
        return x_TI @ self.read.weight.T + self.called(x_TI)


def test_a_weight_that_a_module_reads_itself_stays(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    model, x_TI = Reading(dtype), random(3, NUM_INPUTS, dtype=dtype)
    expected_TO = model(x_TI)
    pack_linears(model, native)
    assert isinstance(model.called, NativeLinear)
    torch.testing.assert_close(model(x_TI), expected_TO, atol=1e-2, rtol=1e-2)


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_OUTPUTS, NUM_INPUTS, dtype=dtype)
        self.head = linear(dtype, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_shared_hooked_and_fused_linears_are_not_packed(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    hooked = linear(dtype)
    hooked.register_forward_pre_hook(lambda module, inputs: None)
    fused = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dtype=dtype)
    normed = weight_norm(linear(dtype))
    model = nn.ModuleDict({"tied": Tied(dtype), "hooked": hooked, "fused": fused, "normed": normed})
    pack_linears(model.requires_grad_(False), native)
    assert not [name for name, module in model.named_modules() if type(module) is NativeLinear]


def test_a_layer_in_two_places_is_packed_once(native: NativeKernels, dtype: torch.dtype) -> None:
    shared = linear(dtype)
    model = nn.ModuleList((nn.Sequential(shared), nn.Sequential(shared)))
    pack_linears(model, native)
    first, second = (next(iter(part.children())) for part in model)
    assert isinstance(first, NativeLinear)
    assert first is second


def test_without_kernels_or_on_another_device_nothing_changes(native: NativeKernels) -> None:
    model = nn.Sequential(linear(torch.bfloat16)).to("meta")
    pack_linears(model, native)
    pack_linears(model, None)
    assert type(model[0]) is nn.Linear

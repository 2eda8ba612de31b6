from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from support.kernel_device import each_type, on_device
from support.kernel_products import assert_near, assert_same, random_rows, tolerance_of
from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.triton import gguf_linear
from triptych.core.runtime.kernels.triton.gguf_blocks import GROUPS
from triptych.core.runtime.kernels.triton.gguf_linear import reference

pytestmark = pytest.mark.gpu
launch_gguf_linear = on_device(gguf_linear.launch_gguf_linear)

NUM_BLOCKS = {32: 11, 256: 3}
"""So many that they fill no whole steps, by the inputs of a block."""
STEPS = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where blocks have floats, if not only in the first place."""


def random_blocks(kind: str, num_outputs: int, num_blocks: int, seed: int = 0) -> torch.Tensor:
    """Blocks of random bytes whose steps, which are floats, are small and finite."""
    rng = np.random.default_rng(seed)
    layout = FORMATS[kind]
    blocks = rng.integers(0, 256, (num_outputs, num_blocks, layout.num_bytes), dtype=np.uint8)
    if kind == "mxfp4":
        blocks[..., 0] = rng.integers(118, 123, (num_outputs, num_blocks))
        return torch.from_numpy(blocks.reshape(num_outputs, -1))
    for place in STEPS.get(kind, (0,)):
        steps = rng.uniform(-0.02, 0.02, (num_outputs, num_blocks, 1)).astype(np.float16)
        blocks[..., place : place + 2] = steps.view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_outputs, -1))


@pytest.mark.parametrize("kind", GROUPS)
def test_blocks_are_read_as_the_gguf_library_reads_them(kind: str) -> None:
    """To the last bit: products with the unit matrix are the weights."""
    blocks = random_blocks(kind, num_outputs=5, num_blocks=2)
    expected_OI = dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()])
    unit_II = torch.eye(expected_OI.shape[1])
    y_IO = launch_gguf_linear(unit_II, blocks, kind, torch.float32)
    assert_same(y_IO.t(), torch.from_numpy(expected_OI))


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("dtype", each_type())
def test_is_the_product_with_dequantized_weights(
    kind: str, num_rows: int, dtype: torch.dtype
) -> None:
    num_blocks = NUM_BLOCKS[FORMATS[kind].num_inputs]
    blocks = random_blocks(kind, num_outputs=70, num_blocks=num_blocks)
    x_TI = random_rows(num_rows, num_blocks * FORMATS[kind].num_inputs, dtype)
    y_TO = launch_gguf_linear(x_TI, blocks, kind, torch.float32)
    expected_TO = reference(x_TI, blocks, kind, torch.float32)
    assert_near(y_TO, expected_TO, tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_of_other_types_and_results_of_another(dtype: torch.dtype, num_rows: int) -> None:
    blocks = random_blocks("q4_k", num_outputs=33, num_blocks=2)
    x_TI = random_rows(num_rows, 512, dtype)
    y_TO = launch_gguf_linear(x_TI, blocks, "q4_k", torch.float32)
    expected_TO = reference(x_TI, blocks, "q4_k", torch.float32)
    assert_near(y_TO, expected_TO, tolerance_of(dtype))
    assert launch_gguf_linear(x_TI, blocks, "q4_k", dtype).dtype is dtype


def test_rows_may_lie_apart_and_blocks_be_a_slice() -> None:
    blocks = random_blocks("q6_k", num_outputs=40, num_blocks=1)[3:37]
    wide_T2I = random_rows(3, 512)
    x_TI = wide_T2I[:, 256:]
    y_TO = launch_gguf_linear(x_TI, blocks, "q6_k", torch.float32)
    assert_near(y_TO, reference(x_TI, blocks, "q6_k", torch.float32))


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("kind", ["q4_0", "q4_k"])
def test_in_deterministic_mode_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    num_inputs = 1024  # enough for several parts
    num_blocks = num_inputs // FORMATS[kind].num_inputs
    blocks = random_blocks(kind, num_outputs=16, num_blocks=num_blocks)
    x_TI = random_rows(70, num_inputs)
    together = launch_gguf_linear(x_TI, blocks, kind, torch.float32, deterministic=True)
    for row in (0, 33, 69):
        alone = launch_gguf_linear(x_TI[row : row + 1], blocks, kind, torch.float32, True)
        assert torch.equal(alone[0], together[row])

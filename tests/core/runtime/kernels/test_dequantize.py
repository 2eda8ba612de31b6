"""What the bytes of blocks mean, against the `gguf` library."""

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from support.block_weights import random_blocks
from triptych.core.block_formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_the_librarys(name: str) -> None:
    packed, kind = random_blocks(name, 6, 512, seed=1), GGMLQuantizationType[name.upper()]
    assert GGML_QUANT_SIZES[kind] == (packed.format.num_inputs, packed.format.num_bytes)
    assert packed.shape == (6, 512)
    expected = torch.from_numpy(dequantize(packed.blocks_OB.numpy(), kind))
    assert torch.equal(packed.dequantize(torch.float32), expected)


def test_some_rows() -> None:
    packed, ids = random_blocks("q4_k", 6, 256, seed=2), torch.tensor([5, 0, 5])
    expected = packed.dequantize(torch.bfloat16)[ids]
    assert torch.equal(packed.rows(ids).dequantize(torch.bfloat16), expected)

"""Pages as bytes: what one engine reads is what another writes, for every kind of cells."""

from __future__ import annotations

import pytest
import torch

from triptych.core.runtime.engine.page_memory import CacheMemory
from triptych.core.runtime.layers.attention import KvCache, KvLayout, KvShape, LatentShape

CPU = torch.device("cpu")
HEADS = KvShape(num_heads=4, num_kv_heads=2, head_dim=16)
ROWS = LatentShape(num_heads=20, head_dim=72, value_dim=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_page_of_heads_and_latents_is_written_as_it_was_read(dtype: torch.dtype) -> None:
    layout = KvLayout(shapes=(ROWS, HEADS, ROWS), page_size=16, dtype=dtype)
    source, target = (KvCache(layout, 4, CPU) for _ in range(2))
    for tensor in source.tensors:
        tensor.view(torch.uint8).random_(0, 120)
    content = bytearray(layout.page_bytes)
    CacheMemory(source).read(2, memoryview(content))
    CacheMemory(target).write(1, memoryview(content))
    for sent, received in zip(source.tensors, target.tensors, strict=True):
        assert torch.equal(sent.view(torch.uint8)[2], received.view(torch.uint8)[1])

"""Pages as bytes: what one engine reads is what another writes, for every kind of cells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from triptych.core.kv.parts import PartKind
from triptych.core.runtime.engine.page_memory import part_memories
from triptych.core.runtime.layers.attention import KvCache, KvLayout, KvShape, LatentShape
from triptych.core.runtime.layers.hidden_rows import HiddenShape
from triptych.core.runtime.layers.states import StateShape

CPU = torch.device("cpu")
HEADS = KvShape(num_heads=4, num_kv_heads=2, head_dim=16)
ROWS = LatentShape(num_heads=20, head_dim=72, value_dim=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_page_of_heads_and_latents_is_written_as_it_was_read(dtype: torch.dtype) -> None:
    """The layers without a window and rows, those with one, and the states, by themselves."""
    layout = KvLayout(
        shapes=(ROWS, HEADS, replace(HEADS, window=8), ROWS),
        page_size=16,
        dtype=dtype,
        states=((StateShape((3, 5), torch.float32),),),
        num_window_pages=4,
        hidden=HiddenShape(24, torch.float32),
    )
    source, target = (KvCache(layout, 4, CPU, num_slots=1, num_snapshots=3) for _ in range(2))
    for kv in (source, target):
        assert kv.states is not None
    for tensor in (*source.tensors, source.states.snapshots):  # type: ignore[union-attr]
        tensor.view(torch.uint8).random_(0, 120)
    memories = part_memories(source), part_memories(target)
    assert [*memories[0]] == [*PartKind]
    for kind, memory in memories[0].items():
        content = memoryview(bytearray(memory.page_bytes))
        memory.read(2, content)
        memories[1][kind].write(1, content)
    pairs = [
        *zip(source.tensors, target.tensors, strict=True),
        (source.states.snapshots, target.states.snapshots),  # type: ignore[union-attr]
    ]
    for sent, received in pairs:
        assert torch.equal(sent.view(torch.uint8)[2], received.view(torch.uint8)[1])

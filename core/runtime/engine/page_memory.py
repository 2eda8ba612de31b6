"""The parts of a KV cache's pages as bytes, for transfers between engines and lower tiers.

Owns `CacheMemory`, which implements `core.kv.transfer.memory.PageMemory` for one kind of parts, and
with it the order of a part's bytes: the tensors of its layers, one after another, as stored. Owns
`HostCopies`: copies between GPU and host on a separate stream, concurrent with steps, also of other
memories. Knows no connection and no lease.

On a CPU numpy makes the copies: torch would make OpenMP keep workers for the transfer thread in
addition to those of the device thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from triptych.core.kv.parts import PartKind
from triptych.core.runtime.layers.attention import KvCache


def part_memories(kv: KvCache) -> dict[PartKind, CacheMemory]:
    """The memory of each kind of parts that a cache has."""
    tensors: dict[PartKind, list[torch.Tensor]] = {kind: [] for kind in PartKind}
    for pages, is_windowed in zip(kv.pages, kv.windowed, strict=True):
        tensors[PartKind.WINDOW if is_windowed else PartKind.FULL] += pages.tensors
    if kv.hidden is not None:
        tensors[PartKind.FULL].append(kv.hidden)
    if kv.states is not None:
        tensors[PartKind.STATE].append(kv.states.snapshots)
    memories = {kind: CacheMemory(own) for kind, own in tensors.items() if own}
    sizes = {kind: memory.page_bytes for kind, memory in memories.items()}
    assert sizes == kv.layout.part_bytes, "parts have the layout's sizes"
    return memories


class CacheMemory:
    """The parts that `tensors` hold along their first axis.

    Called from one thread, which waits only for its own copies.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.view(torch.uint8).flatten(1) for tensor in tensors]
        sizes = [tensor.shape[1] for tensor in self._tensors]
        self._places = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        self._device = self._tensors[0].device
        self._host = [t.numpy() for t in self._tensors] if self._device.type == "cpu" else []
        self._copies = HostCopies(self._device)
        self.page_bytes = sum(sizes)

    def num_bytes(self, page_id: int) -> int:
        """The size of a page; all pages have the same."""
        return self.page_bytes

    def read(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page to `buffer`."""
        if self._host:
            content = np.frombuffer(buffer, dtype=np.uint8)
            for pages, place in zip(self._host, self._places, strict=True):
                content[place] = pages[page_id]
        else:
            self._copy(page_id, buffer, is_read=True)

    def write(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page from `buffer`; the copy is complete when this returns."""
        if self._host:
            content = np.frombuffer(buffer, dtype=np.uint8)
            for pages, place in zip(self._host, self._places, strict=True):
                pages[page_id] = content[place]
        else:
            self._copy(page_id, buffer, is_read=False)

    def _copy(self, page_id: int, buffer: memoryview, *, is_read: bool) -> None:
        content = torch.frombuffer(buffer, dtype=torch.uint8)
        here = [pages[page_id] for pages in self._tensors]
        there = [content[place] for place in self._places]
        source, target = (here, there) if is_read else (there, here)
        self._copies.copy(target, source)


class HostCopies:
    """Copies between a device and the host, concurrent with steps, on one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target, and wait for the copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()

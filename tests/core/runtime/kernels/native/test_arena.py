"""Memory of packed weights."""

from __future__ import annotations

import threading

import psutil
import torch

from triptych.core.runtime.kernels.native.arena import Arena

MIB = 2**20


def test_tensors_do_not_overlap_and_begin_on_cache_lines() -> None:
    arena = Arena()
    shapes = [(3, 5), (1, 1), (700, 900), (5000, 900), (7, 11), (4000, 3000)]
    tensors = [arena.empty(shape, torch.bfloat16) for shape in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tuple(tensor.shape) == shape
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        assert (tensor == value).all()


def test_small_ones_lie_side_by_side() -> None:
    arena = Arena()
    first, second = (arena.empty((512, 1024), torch.float32) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 2 * MIB
    assert first.data_ptr() % (2 * MIB) == 0


def test_memory_goes_back_with_the_last_tensor() -> None:
    process, arena = psutil.Process(), Arena()
    before = process.memory_info().rss
    tensors = [arena.empty((MIB,), torch.float32).fill_(1) for _ in range(32)]
    assert process.memory_info().rss - before > 100 * MIB
    tensors.clear()
    assert process.memory_info().rss - before < 40 * MIB


def test_threads_may_share_it() -> None:
    arena, tensors = Arena(), []

    def take(value: int) -> None:
        for _ in range(200):
            tensor = arena.empty((1000,), torch.float32)
            tensor.fill_(value)
            tensors.append((value, tensor))

    threads = [threading.Thread(target=take, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tensors) == 800
    assert all((tensor == value).all() for value, tensor in tensors)

"""Processes that draw images for training.

Owns how they begin and end. Knows nothing of images.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread

import torch


@contextmanager
def worker_pool(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, each of which computes on one thread and ends with this one."""
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Workers hold both ends of their queue, and would wait for work of a killed parent."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

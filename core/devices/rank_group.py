"""The ranks of one divided model, and what they tell each other within a step.

Owns the process group: gloo between processes on one CPU, NCCL between GPUs. Is imported where a
model is divided, and nowhere else. Every rank makes the same calls in the same order; one that
cannot raises or waits, and its process ends (see `core.engine.ranks`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=10)
"""For a rank that is there and does not answer. One that died is noticed at once."""


class RankGroup:
    """This process's place among the ranks, `rank` of `num_ranks`."""

    def __init__(self, backend: Any, *, is_ordered: bool) -> None:
        self.rank: int = backend.rank()
        self.num_ranks: int = backend.size()
        self._backend = backend
        self._is_ordered = is_ordered

    @classmethod
    def join(cls, file: str, rank: int, num_ranks: int, device: torch.device) -> RankGroup:
        """Meet the others at a new file; returns when all are there."""
        store = dist.FileStore(file, num_ranks)  # type: ignore[attr-defined]  # not in `__all__`
        is_gpu = device.type == "cuda"
        backend = (_nccl if is_gpu else _gloo)(store, rank, num_ranks)
        group = cls(backend, is_ordered=not is_gpu)
        group.broadcast(torch.zeros(1, device=device))  # NCCL meets at the first call
        return group

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on all; `x` may be overwritten.

        On a CPU it is added up in the order of ranks, so that a row's sum does not follow from its
        place in the batch, as it does where ranks add up different parts of a tensor.
        """
        x = x.contiguous()
        if not self._is_ordered:
            self._backend.allreduce([x]).wait()
            return x
        parts = x.new_empty(self.num_ranks, *x.shape).unbind()
        self._backend.allgather([list(parts)], [x]).wait()
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0]

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Every rank's `x`, of one shape, on rank 0; `None` elsewhere."""
        x = x.contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.rank:
            self._backend.gather([], [x], options).wait()
            return None
        parts = x.new_empty(self.num_ranks, *x.shape).unbind()
        self._backend.gather([list(parts)], [x], options).wait()
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on all: written into that of the others, which has its shape and type."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._backend.broadcast([x], options).wait()
        return x


def _gloo(store: Any, rank: int, num_ranks: int) -> Any:
    """Processes of this machine alone: they listen where no other can reach them."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return kind(store, rank, num_ranks, options)


def _nccl(store: Any, rank: int, num_ranks: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)

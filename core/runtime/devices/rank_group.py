"""The ranks of one divided model, and their collective operations within a step.

Owns the process group: gloo between processes on one CPU, NCCL between GPUs. Imported only where a
model is divided. Every rank makes the same calls in the same order; a rank that cannot raises or
waits, and its process ends (see `core.runtime.engine.ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=10)
"""For a rank that runs and does not answer. One that died is noticed at once."""


class RankGroup:
    """This process's place among the ranks, `rank` of `num_ranks`."""

    def __init__(
        self, store: Any, rank: int, num_ranks: int, open_backend: Callable[..., Any]
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store, self._open_backend = store, open_backend
        self._backend = open_backend(store, rank, num_ranks)
        self._is_ordered = open_backend is not _nccl

    @classmethod
    def join(cls, file: str, rank: int, num_ranks: int, device: torch.device) -> RankGroup:
        """Meet the other ranks at a new file; returns when all are there."""
        store = dist.FileStore(file, num_ranks)  # type: ignore[attr-defined]  # not in `__all__`
        group = cls(store, rank, num_ranks, _nccl if device.type == "cuda" else _gloo)
        group.broadcast(torch.zeros(1, device=device))  # NCCL meets at the first call
        return group

    @classmethod
    def unmet(cls, num_ranks: int) -> RankGroup:
        """Rank 0's place where no rank is, for what only asks how the model is divided."""
        return cls(None, 0, num_ranks, lambda *place: None)

    def part(self, ranks: Sequence[int]) -> RankGroup:
        """A group of some of the ranks, this one among them. Each of those ranks makes the call."""
        kind: Any = dist.PrefixStore  # type: ignore[attr-defined]  # not in `__all__`
        store = kind(f"part {list(ranks)}", self._store)
        return RankGroup(store, ranks.index(self.rank), len(ranks), self._open_backend)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, the same bits on all; `x` may be overwritten.

        A CPU adds in the order of ranks, so that a row's sum does not depend on its place in the
        batch, as it would if each rank added up another part of the tensor.
        """
        if not self._is_ordered:
            x = x.contiguous()
            self._backend.allreduce([x]).wait()
            return x
        total, *others = self.all_gather(x)
        for part in others:
            total.add_(part)
        return total

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather every rank's `x`, of one shape, on all ranks."""
        parts = x.new_empty(self.num_ranks, *x.shape).unbind()
        self._backend.allgather([list(parts)], [x.contiguous()]).wait()
        return parts

    def exchange(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send each rank its part. Returns the parts received, of these shapes."""
        sent = torch.cat([part.flatten() for part in parts])
        sizes = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        to = [part.numel() for part in parts]
        self._backend.alltoall_base(received, sent, sizes, to).wait()
        return [x.view(*shape) for x, shape in zip(received.split(sizes), shapes, strict=True)]

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Gather every rank's `x`, of one shape, on rank 0; `None` elsewhere."""
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
        """Copy rank 0's `x` into that of the other ranks, which has its shape and type."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._backend.broadcast([x], options).wait()
        return x


def _gloo(store: Any, rank: int, num_ranks: int) -> Any:
    """Open gloo between processes of this machine: they listen on loopback only."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return kind(store, rank, num_ranks, options)


def _nccl(store: Any, rank: int, num_ranks: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, num_ranks, options)

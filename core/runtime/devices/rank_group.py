"""The ranks of one divided model, and what they tell each other within a step.

Owns the process group: gloo between processes on one CPU, NCCL between GPUs. Is imported where a
model is divided, and nowhere else. Every rank makes the same calls in the same order; one that
cannot raises or waits, and its process ends (see `core.runtime.engine.ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=10)
"""For a rank that is there and does not answer. One that died is noticed at once."""


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
        """Meet the others at a new file; returns when all are there."""
        store = dist.FileStore(file, num_ranks)  # type: ignore[attr-defined]  # not in `__all__`
        group = cls(store, rank, num_ranks, _nccl if device.type == "cuda" else _gloo)
        group.broadcast(torch.zeros(1, device=device))  # NCCL meets at the first call
        return group

    @classmethod
    def unmet(cls, num_ranks: int) -> RankGroup:
        """Rank 0's place where no rank is, for what only asks how the model is divided."""
        return cls(None, 0, num_ranks, lambda *place: None)

    def part(self, ranks: Sequence[int]) -> RankGroup:
        """Some ranks among themselves, this one with them: each of them calls it."""
        kind: Any = dist.PrefixStore  # type: ignore[attr-defined]  # not in `__all__`
        store = kind(f"part {list(ranks)}", self._store)
        return RankGroup(store, ranks.index(self.rank), len(ranks), self._open_backend)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, the same bits on all; `x` may be overwritten.

        On a CPU it is added up in the order of ranks, so that a row's sum does not follow from its
        place in the batch, as it does where ranks add up different parts of a tensor.
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
        """Every rank's `x`, of one shape, on all."""
        parts = x.new_empty(self.num_ranks, *x.shape).unbind()
        self._backend.allgather([list(parts)], [x.contiguous()]).wait()
        return parts

    def exchange(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send each rank its part. Returns what each has sent here, which is of such a shape."""
        sent = torch.cat([part.flatten() for part in parts])
        sizes = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        to = [part.numel() for part in parts]
        self._backend.alltoall_base(received, sent, sizes, to).wait()
        return [x.view(*shape) for x, shape in zip(received.split(sizes), shapes, strict=True)]

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

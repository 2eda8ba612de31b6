"""Ranks of a divided decoder on threads of this process: gloo between them, no process to start.

Plans go from rank 0 to the others as bytes, as they do between processes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from support.decoder_rig import CPU, Rig
from triptych.core.engine_api.plan import Plan, Runner, TokenPlan
from triptych.core.runtime.decoders.division import divide
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.decoders.projection_targets import AS_STORED
from triptych.core.runtime.decoders.tensor_names import decoder_targets
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.rank_sampler import FollowingSampler, LeadingSampler
from triptych.core.runtime.engine.ranks import LeadingRunner
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenHead, TokenRunner
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import KvCache, KvLayout
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.shards import BLOCK_UNIT, PLAIN_UNIT
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.encoding import WeightEncoding

T = TypeVar("T")
_PATIENCE = timedelta(minutes=2)


def open_gloo(store: Any, rank: int, num_ranks: int) -> Any:
    """The ranks' way to each other on this machine."""
    return dist.ProcessGroupGloo(store, rank, num_ranks, _PATIENCE)


def on_ranks(num_ranks: int, work: Callable[[RankGroup], T]) -> list[T]:
    """What `work` returns as each rank. Raises what any of them raised."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        with torch.inference_mode():
            return work(RankGroup(store, rank, num_ranks, open_gloo))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


@dataclass
class RandomTensors:
    """A checkpoint of random tensors for the decoder of a configuration, which is not divided."""

    config: DecoderConfig
    dtype: torch.dtype = torch.float32
    by_experts: bool = False
    encoding: WeightEncoding = AS_STORED

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        sketch = Decoder(self.config, dtype=self.dtype, device=torch.device("meta"))
        self.values = {
            target.name: torch.randn(target.shape, dtype=self.dtype) * 0.15
            + (target.name.endswith("norm.weight") and not self.config.has_centred_norms)
            for target in decoder_targets(sketch)
        }

    @property
    def tensors(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def decoder(
        self, group: RankGroup | None = None, native: NativeKernels | None = None
    ) -> Decoder:
        """The decoder, or one rank's part of it."""
        config = self.config
        if group is not None:
            unit = BLOCK_UNIT if self.encoding.has_blocks else PLAIN_UNIT
            place = group.rank, group.num_ranks
            config = divide(config, *place, by_experts=self.by_experts, unit=unit)
        decoder = Decoder(config, dtype=self.dtype, device=CPU, group=group)
        for target in decoder_targets(decoder, encoding=self.encoding):
            target.fill(self)
        decoder.prepare(native)
        return decoder


@dataclass
class StoredDecoder:
    """The decoder in a folder, in float32, whole or one rank's part."""

    folder: Path
    encoding: str = "auto"

    def decoder(
        self, group: RankGroup | None = None, native: NativeKernels | None = None
    ) -> Decoder:
        with Checkpoint.open(self.folder) as checkpoint:
            blueprint = NativeBlueprint(
                checkpoint.config,
                max_length=0,
                dtype=torch.float32,
                device=CPU,
                native=native,
                encoding=WeightEncoding.of(self.encoding, checkpoint.tensors),
            )
            if group is not None:
                blueprint.join(group)
            return blueprint.build(checkpoint, lambda _: None)


class PlanQueue:
    """In place of `core.runtime.engine.ranks.Ranks`; `group` is there once rank 0 has joined."""

    group: RankGroup

    def __init__(self, num_followers: int) -> None:
        self.queues = [queue.SimpleQueue[bytes]() for _ in range(num_followers)]

    def send(self, plan: Plan) -> None:
        for each in self.queues:
            each.put(msgspec.msgpack.encode(plan))

    def end(self) -> None:
        for each in self.queues:
            each.put(b"")


class LeadingRig(Rig):
    """A rig on rank 0."""

    def __init__(self, decoder: Decoder, ranks: PlanQueue, **options: Any) -> None:
        self._group = ranks.group
        super().__init__(decoder, decoder.config.kv_layout(4, decoder.dtype), **options)
        self.runner = LeadingRunner(self.runner, ranks)

    def head_type(self, model: Any, sampler: Any, **options: Any) -> TokenHead:
        return TextHead(model, LeadingSampler(sampler, self._group), **options)


def drive_divided(
    tensors: RandomTensors | StoredDecoder,
    num_ranks: int,
    drive: Callable[[Rig], T],
    native: NativeKernels | None = None,
    **options: Any,
) -> T:
    """What `drive` returns for a rig whose decoder is divided."""

    def lead(ranks: PlanQueue) -> T:
        decoder = tensors.decoder(ranks.group, native)
        return drive(LeadingRig(decoder, ranks, native=native, **options))

    def follow(group: RankGroup) -> TokenRunner:
        decoder = tensors.decoder(group, native)
        head_type = partial(TextHead, decoder, FollowingSampler(group))
        layout = decoder.config.kv_layout(4, decoder.dtype)
        return following_runner(head_type, layout, native=native, **options)

    return lead_and_follow(num_ranks, lead, follow)


def lead_and_follow(
    num_ranks: int,
    lead: Callable[[PlanQueue], T],
    follow: Callable[[RankGroup], Runner],
    kind: type[Plan] = TokenPlan,
) -> T:
    """What `lead` returns on rank 0, while runners that `follow` makes run its plans."""
    plans = PlanQueue(num_ranks - 1)

    def work(group: RankGroup) -> T | None:
        if not group.rank:
            plans.group = group
            try:
                return lead(plans)
            finally:
                plans.end()
        runner = follow(group)
        while message := plans.queues[group.rank - 1].get():
            runner.launch(msgspec.msgpack.decode(message, type=kind))
        return None

    result = on_ranks(num_ranks, work)[0]
    assert result is not None
    return result


def following_runner(
    head_type: Callable[..., TokenHead],
    layout: KvLayout,
    *,
    native: NativeKernels | None = None,
    max_batch_size: int = 16,
    max_length: int = 96,
) -> TokenRunner:
    """One of another rank than 0, over as many pages as a rig has."""
    num_pages = max_batch_size * -(-max_length // layout.page_size)
    return TokenRunner(
        head_type(max_batch_size=max_batch_size, device=CPU),
        KvCache(layout, num_pages, CPU, native),
        max_batch_size=max_batch_size,
        max_length=max_length,
        device=CPU,
    )

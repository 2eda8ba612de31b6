"""The choice of layers whose weights stay in host memory, and their way there while loading.

Owns the sizes. `core.runtime.layers.host_layers` owns the copies of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from triptych.core.errors import ConfigError
from triptych.core.ledger import mib
from triptych.core.runtime.decoders.projection_targets import ProjectionTarget
from triptych.core.runtime.layers.host_layers import NUM_BUFFERS
from triptych.core.runtime.tensors.checkpoint import TensorSource
from triptych.core.runtime.tensors.loading import Target

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The layers from `first` on stay in host memory; `layer_bytes` are their sizes."""

    first: int
    layer_bytes: tuple[int, ...]

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory, which each step copies."""
        return sum(self.layer_bytes)

    @property
    def saved_bytes(self) -> int:
        """The bytes that the device has for other purposes."""
        return self.host_bytes - NUM_BUFFERS * max(self.layer_bytes)

    @classmethod
    def of(cls, targets: Iterable[Target], num_bytes: int, item_bytes: int) -> HostPlan:
        """The last layers within `num_bytes` that save the most.

        Raises `ConfigError` where none save anything: two of the largest are on the device.
        """
        sizes: dict[int, int] = {}
        for target in targets:
            found = _LAYER.search(target.name)
            if found is not None and isinstance(target, ProjectionTarget):
                layer = int(found[1])
                sizes[layer] = sizes.get(layer, 0) + target.num_bytes(item_bytes)
        in_order = tuple(sizes[layer] for layer in sorted(sizes))
        plans = [cls(first, in_order[first:]) for first in reversed(range(len(in_order)))]
        within = [plan for plan in plans if plan.host_bytes <= num_bytes]
        best = max(within, key=lambda plan: plan.saved_bytes, default=None)
        if best is None or best.saved_bytes <= 0:
            raise ConfigError(_too_few(plans))
        return best


def _too_few(plans: Sequence[HostPlan]) -> str:
    """Why the last layers save nothing, and how many GiB would."""
    least = next((plan.host_bytes for plan in plans if plan.saved_bytes > 0), None)
    remedy = "leave it out."
    if least is not None:
        largest = mib(max(plans[-1].layer_bytes))
        remedy = f"give {ceil(100 * least / 2**30) / 100:g} or more (a layer has up to {largest}),"
        remedy += " or leave it out."
    return (
        "--cpu-offload-gb: two of the layers in host memory are on the device at any time, so that"
        f" fewer than three save nothing; {remedy}"
    )


@dataclass(frozen=True, slots=True)
class LastTarget:
    """The last destination of a layer; `then` is called when it is filled."""

    target: Target
    then: Callable[[], None]

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.target.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return self.target.shape

    def fill(self, source: TensorSource) -> None:
        """Put the tensor into place, and end the layer."""
        self.target.fill(source)
        self.then()

    def num_bytes(self, item_bytes: int) -> int:
        """The bytes of the tensor in memory."""
        return self.target.num_bytes(item_bytes)


def after_each_layer(
    targets: Iterable[Target], first: int, take: Callable[[int], None]
) -> Iterator[Target]:
    """The same targets; `take` is called with each layer from `first` on once it is filled."""
    ordered = list(targets)
    last = {
        int(found[1]): place
        for place, target in enumerate(ordered)
        if (found := _LAYER.search(target.name)) is not None
    }
    ends = {place: layer for layer, place in last.items() if layer >= first}
    for place, target in enumerate(ordered):
        layer = ends.get(place)
        yield target if layer is None else LastTarget(target, partial(take, layer))

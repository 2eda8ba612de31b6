"""The choice of layers whose weights stay in host memory, and their way there while loading.

Owns the sizes. `core.runtime.layers.host_layers` owns the copies of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

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
        """As many of the last layers as `num_bytes` hold.

        Raises `ConfigError` for fewer than three, of which two are on the device at any time.
        """
        sizes: dict[int, int] = {}
        for target in targets:
            found = _LAYER.search(target.name)
            if found is not None and isinstance(target, ProjectionTarget):
                layer = int(found[1])
                sizes[layer] = sizes.get(layer, 0) + target.num_bytes(item_bytes)
        last_first = [sizes[layer] for layer in sorted(sizes, reverse=True)]
        num_layers = sum(total <= num_bytes for total in accumulate(last_first))
        if num_layers <= NUM_BUFFERS:
            least = sum(last_first[: NUM_BUFFERS + 1])
            raise ConfigError(
                "--cpu-offload-gb: two of the layers in host memory are on the device at any time,"
                f" so that fewer than three save nothing; give {least / 2**30:.2g} or more"
                f" (a layer has {mib(last_first[0])}), or leave it out."
            )
        return cls(len(sizes) - num_layers, tuple(reversed(last_first[:num_layers])))


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

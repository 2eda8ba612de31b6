"""The adapters of a loaded image model, and the runs they take part in.

Owns which adapters there are, and which act on which rows. The model itself is never changed: a
run without adapters passes nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from triptych.core.errors import WeightsError
from triptych.core.options.config import Config
from triptych.core.weights.pipeline_index import prefix_errors
from triptych.modalities.diffusion.adapter_names import adapter_places, check_uses
from triptych.modalities.diffusion.engine.adapters.branches import (
    AdapterBranch,
    Layer,
    joined,
    share_of,
    stacked,
)
from triptych.modalities.diffusion.engine.adapters.files import (
    LowRank,
    open_adapter_file,
    read_adapter,
)
from triptych.modalities.diffusion.engine.families.table import family_of
from triptych.modalities.diffusion.engine.loading.components import Components, DtypeOf, denoiser_of
from triptych.modalities.diffusion.wire import AdapterUse

Uses = tuple[AdapterUse, ...]
Branches = Mapping[Layer, AdapterBranch]


def adapter_bytes(config: Config, *, dtype: DtypeOf) -> int:
    """Bytes that all adapters of `--lora-paths` take on the device. Reads headers alone."""
    total = 0
    for name, place in adapter_places(config.images).items():
        with prefix_errors(f"adapter {name}"), open_adapter_file(place, config.models) as file:
            values = sum(math.prod(info.shape) for info in file.tensors.values())
            total += values * dtype(file.dtype).itemsize
    return total


class Adapters:
    """The adapters of one loaded model, by name. They hook into the model's layers."""

    def __init__(
        self, parts: Mapping[str, Any], pairs: Mapping[str, Sequence[LowRank]], max_in_run: int
    ) -> None:
        branches: dict[str, dict[Layer, AdapterBranch]] = {}
        for name, found in pairs.items():
            with prefix_errors(f"adapter {name}"):
                branches[name] = dict(_bound(pair, parts) for pair in found)
        _stack(branches.values())
        self._branches: Mapping[str, Branches] = branches
        self._max_in_run = max_in_run
        denoiser = denoiser_of(parts)
        self._device = next(denoiser.parameters()).device
        self._can_mix = _keeps_rows_apart(denoiser, self._branches.values())

    @classmethod
    def open(cls, config: Config, components: Components) -> Adapters:
        """Read every adapter of `--lora-paths` and lay it beside the layers it changes.

        Raises `WeightsError` naming the adapter, its file and tensor where it is damaged, of a
        kind that is not offered, or made for another model.
        """
        parts = components.parts
        denoiser = "unet" if "unet" in parts else "transformer"
        pairs = {}
        for name, place in adapter_places(config.images).items():
            with prefix_errors(f"adapter {name}"), open_adapter_file(place, config.models) as file:
                pairs[name] = read_adapter(
                    file, components.pipeline, denoiser, parts[denoiser].config
                )
                _check_rank(pairs[name], config.images.max_lora_rank)
        return cls(parts, pairs, config.images.max_num_loras)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may ask for."""
        return tuple(self._branches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them on the device."""
        return sum(
            tensor.nbytes
            for branches in self._branches.values()
            for branch in branches.values()
            for tensor in (branch.down, branch.up)
        )

    def check(self, uses: Sequence[AdapterUse]) -> Uses:
        """What a request asks for, as it acts. Raises `InvalidRequest` naming those there are.

        Equal results act equally: they can be compared, and be part of a key.
        """
        return check_uses(uses, self._branches)

    def key_of(self, uses: Uses) -> Hashable:
        """Images with equal keys may share a run.

        All may, unless the model leaves it open which part of a tensor is whose, or there are more
        adapters than a run may have: then they are dealt into groups.
        """
        if not self._can_mix:
            return uses
        if len(self._branches) <= self._max_in_run:
            return ()
        order = sorted(self._branches)
        return frozenset(order.index(use.name) // self._max_in_run for use in uses) or frozenset(
            {0}
        )

    @contextmanager
    def applied(self, rows: Sequence[Uses]) -> Iterator[None]:
        """While inside, a run of the model is changed for each of its rows as that row asks.

        `rows` as `check` gave them; the rows of the run come in this order. One entry stands for
        all rows, however many there are.
        """
        names = dict.fromkeys(use.name for uses in rows for use in uses)
        scales = [{use.name: use.scale for use in uses} for uses in rows]
        shares = [
            (self._branches[name], share_of([row.get(name, 0.0) for row in scales], self._device))
            for name in names
        ]
        with joined(shares):
            yield


def _stack(adapters: Collection[dict[Layer, AdapterBranch]]) -> None:
    """Those beside one layer, one by one: what a stack is made of is let go before the next."""
    for layer in {layer for branches in adapters for layer in branches}:
        beside = [branches for branches in adapters if layer in branches]
        found = stacked([branches[layer] for branches in beside])
        for branches, branch in zip(beside, found, strict=True):
            branches[layer] = branch


def _check_rank(pairs: Sequence[LowRank], max_rank: int) -> None:
    rank = max((pair.rank for pair in pairs), default=0)
    if max_rank and rank > max_rank:
        raise WeightsError(f"Its rank is {rank}; --max-lora-rank allows {max_rank}.")


def _bound(pair: LowRank, parts: Mapping[str, Any]) -> tuple[Layer, AdapterBranch]:
    """The layer that a pair changes, and the branch beside it, in the layer's type and place."""
    where = f"{pair.part}.{pair.module}"
    layer = _layer(parts.get(pair.part), pair.module)
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise WeightsError(f"It changes {where}, which is no layer of this model that it could.")
    weight = layer.weight
    kernel = weight.shape[2:]
    down = _shaped(pair.down, (pair.rank, weight.shape[1], *kernel), f"{where}.lora_A")
    up = _shaped(pair.up, (len(weight), pair.rank, *[1] * len(kernel)), f"{where}.lora_B")
    return layer, AdapterBranch(layer, down.to(weight), up.to(weight))


def _layer(part: Any, path: str) -> Any:
    """The module of a path. Text encoders were once one level deeper."""
    for name in (path, path.removeprefix("text_model.")):
        try:
            return part.get_submodule(name)
        except AttributeError:
            continue
    return None


def _shaped(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """In the layer's shape. A matrix and a kernel of one pixel are the same to files."""
    if [size for size in tensor.shape if size > 1] != [size for size in shape if size > 1]:
        raise WeightsError(
            f"Tensor {name} has shape {list(tensor.shape)}, but the model needs {list(shape)}."
        )
    return tensor.reshape(shape)


def _keeps_rows_apart(denoiser: Any, adapters: Iterable[Branches]) -> bool:
    """Whether in every layer that changes a tensor's first dimension counts the rows.

    Where tokens of all rows are reordered (experts), lie end to end (rows given as lists), or
    rows are run a second time behind the first (Qwen-Image-Edit's clean frames), it does not.
    """
    if family_of(denoiser).lists or denoiser.config.get("zero_cond_t"):
        return False
    changed = {layer for branches in adapters for layer in branches}
    experts = (module for name, module in denoiser.named_modules() if ".experts." in name)
    return changed.isdisjoint(experts)

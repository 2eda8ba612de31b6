"""The LoRA adapters of a loaded image model, applied per row of a run.

Owns the loaded adapters and the rows they act on. The model itself is never changed; a run without
adapters has no overhead.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from triptych.core.errors import WeightsError
from triptych.core.options.config import Config
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.peft import is_of_text, locate_adapter
from triptych.core.weights.pipeline_index import prefix_errors
from triptych.modalities.diffusion.adapter_names import check_uses
from triptych.modalities.diffusion.engine.adapters.branches import (
    AdapterBranch,
    Layer,
    apply_branches,
    make_share,
    stack_branches,
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
    """Bytes that all adapters of `--lora-paths` take on the device. Reads only headers."""
    total = 0
    for name, file in _open_files(config):
        with prefix_errors(f"adapter {name}"), file:
            total += file_bytes(file, dtype)
    return total


def file_bytes(file: Checkpoint, dtype: DtypeOf) -> int:
    """Bytes that an adapter takes on the device. Reads only the header."""
    values = sum(math.prod(info.shape) for info in file.tensors.values())
    return values * dtype(file.dtype).itemsize


def _open_files(config: Config) -> Iterator[tuple[str, Checkpoint]]:
    """The adapters of `--lora-paths` by name, except those of text models."""
    for each in config.adapters.places():
        with prefix_errors(f"adapter {each.name}"):
            if is_of_text(locate_adapter(each.path, config.models)):
                continue
            file = open_adapter_file(each.path, config.models)
        yield each.name, file


class Adapters:
    """The adapters of one loaded model, by name. They hook into the model's layers.

    Adapters may be added and removed by another thread than that of the steps.
    """

    def __init__(
        self, parts: Mapping[str, Any], pairs: Mapping[str, Sequence[LowRank]], max_in_run: int
    ) -> None:
        self._parts = parts
        self._branches: Mapping[str, Branches] = {}
        self._groups: dict[str, int] = {}
        self._num_added = 0
        self._lock = threading.Lock()  # of changes: one may be added while another is removed
        self._max_in_run = max_in_run
        self._denoiser = denoiser_of(parts)
        self.device = next(self._denoiser.parameters()).device
        self.add(pairs)

    @classmethod
    def open(cls, config: Config, components: Components) -> Adapters:
        """Read every adapter of `--lora-paths` and match it to the layers it changes.

        Raises `WeightsError` naming the adapter, its file and tensor if it is damaged, of an
        unsupported kind, or made for another model.
        """
        pairs = {}
        for name, file in _open_files(config):
            with prefix_errors(f"adapter {name}"), file:
                pairs[name] = pairs_of(file, components, config.adapters.max_lora_rank)
        return cls(components.parts, pairs, config.adapters.max_num_loras)

    def add(self, pairs: Mapping[str, Sequence[LowRank]]) -> None:
        """Match adapters to the layers they change. Raises `WeightsError`; none is added then."""
        added: dict[str, dict[Layer, AdapterBranch]] = {}
        for name, found in pairs.items():
            with prefix_errors(f"adapter {name}"):
                added[name] = dict(_bind(pair, self._parts) for pair in found)
        _stack(added.values())
        with self._lock:
            for name in sorted(added):
                self._groups[name] = self._num_added // self._max_in_run
                self._num_added += 1
            branches = {**self._branches, **added}
            self._can_mix = _keeps_rows_apart(self._denoiser, branches.values())
            self._branches = branches  # at once, for the thread of the steps

    def remove(self, name: str) -> None:
        """Remove an adapter that no row uses."""
        with self._lock:
            self._branches = {own: each for own, each in self._branches.items() if own != name}
            del self._groups[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return tuple(self._branches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters on the device."""
        return sum(
            tensor.nbytes
            for branches in self._branches.values()
            for branch in branches.values()
            for tensor in (branch.down, branch.up)
        )

    def check(self, uses: Sequence[AdapterUse]) -> Uses:
        """Normalize a request's adapters. Raises `InvalidRequest` listing the known names.

        Equal results act equally, so they can be compared and used in keys.
        """
        return check_uses(uses, self._branches)

    def key_of(self, uses: Uses) -> Hashable:
        """Images with equal keys may share a run.

        All may, unless the model does not keep rows separate in its tensors, or there are more
        adapters than a run may have: then adapters form groups.
        """
        if not self._can_mix:
            return uses
        if self._num_added <= self._max_in_run:
            return ()
        return frozenset(self._groups[use.name] for use in uses) or frozenset({0})

    @contextmanager
    def applied(self, rows: Sequence[Uses]) -> Iterator[None]:
        """A context in which each row of a run has its adapters applied.

        `rows` hold results of `check`, in the order of the run. A single entry applies to all
        rows.
        """
        names = dict.fromkeys(use.name for uses in rows for use in uses)
        scales = [{use.name: use.scale for use in uses} for uses in rows]
        shares = [
            (self._branches[name], make_share([row.get(name, 0.0) for row in scales], self.device))
            for name in names
        ]
        with apply_branches(shares):
            yield


def pairs_of(file: Checkpoint, components: Components, max_rank: int) -> list[LowRank]:
    """The changes that a file makes to a model. Raises `WeightsError`."""
    parts = components.parts
    denoiser = "unet" if "unet" in parts else "transformer"
    pairs = read_adapter(file, components.pipeline, denoiser, parts[denoiser].config)
    _check_rank(pairs, max_rank)
    return pairs


def _stack(adapters: Collection[dict[Layer, AdapterBranch]]) -> None:
    """Stack the adapters of one layer at a time, freeing the sources before the next."""
    for layer in {layer for branches in adapters for layer in branches}:
        users = [branches for branches in adapters if layer in branches]
        found = stack_branches([branches[layer] for branches in users])
        for branches, branch in zip(users, found, strict=True):
            branches[layer] = branch


def _check_rank(pairs: Sequence[LowRank], max_rank: int) -> None:
    rank = max((pair.rank for pair in pairs), default=0)
    if max_rank and rank > max_rank:
        raise WeightsError(f"Its rank is {rank}; --max-lora-rank allows {max_rank}.")


def _bind(pair: LowRank, parts: Mapping[str, Any]) -> tuple[Layer, AdapterBranch]:
    """The layer that a pair changes, and its branch, with the layer's dtype and device."""
    where = f"{pair.part}.{pair.module}"
    layer = _layer(parts.get(pair.part), pair.module)
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise WeightsError(
            f"It changes {where}, which is not a linear or convolution layer of this model."
        )
    weight = layer.weight
    kernel = weight.shape[2:]
    down = _reshape(pair.down, (pair.rank, weight.shape[1], *kernel), f"{where}.lora_A")
    up = _reshape(pair.up, (len(weight), pair.rank, *[1] * len(kernel)), f"{where}.lora_B")
    return layer, AdapterBranch(layer, down.to(weight), up.to(weight))


def _layer(part: Any, path: str) -> Any:
    """The module at a path; older text encoders are nested one level deeper."""
    for name in (path, path.removeprefix("text_model.")):
        try:
            return part.get_submodule(name)
        except AttributeError:
            continue
    return None


def _reshape(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Reshape to the layer's shape: files may store a 1 x 1 kernel as a matrix."""
    if [size for size in tensor.shape if size > 1] != [size for size in shape if size > 1]:
        raise WeightsError(
            f"Tensor {name} has shape {list(tensor.shape)}, but the model needs {list(shape)}."
        )
    return tensor.reshape(shape)


def _keeps_rows_apart(denoiser: Any, adapters: Iterable[Branches]) -> bool:
    """Whether the first tensor dimension counts rows in every layer that adapters change.

    It does not if tokens of all rows are reordered (experts), concatenated (rows passed as lists),
    or rows run a second time after the first (Qwen-Image-Edit's clean frames).
    """
    if family_of(denoiser).lists or denoiser.config.get("zero_cond_t"):
        return False
    changed = {layer for branches in adapters for layer in branches}
    experts = (module for name, module in denoiser.named_modules() if ".experts." in name)
    return changed.isdisjoint(experts)
